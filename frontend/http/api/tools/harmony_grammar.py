"""Grammars of whole outputs in Harmony, gpt-oss's format: its markers, and between them what a request asks for.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>the answer
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}

Reasoning is free, and comes any number of times; so does a word to the user in `commentary`, unless an answer in a format may
follow it. Then comes an answer, in the format that the request asks for, or a call, whose arguments follow the function's
schema. After a call the model stops, so an output has one. harmony_plan.py calls this; the parser is text/harmony/parser.py.
"""

from typing import Any

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.call_tags import commented, followed_schema
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.ipc.structured_outputs import StructuredOutputs, check_grammar

Format = dict[str, Any]
_ANY = {"type": "any_text"}
_NEXT = {"type": "const_string", "value": "<|start|>assistant"}


def harmony_grammar(tools: ToolUse | None, own: StructuredOutputs | None) -> StructuredOutputs | None:
    """The grammar of an output; None if it is free. own: the format that the request asks for. Raises ApiError 400."""
    forced = tools is not None and tools.mode != "auto"
    strict = tools is not None and any(function.strict for function in tools.functions)
    if own is None and not forced and not strict:
        return None
    if forced and own is not None and own.kind not in ("json", "json_object"):
        raise invalid(
            "tool_choice: a call that must be made and another format of the answer exclude each other", "tool_choice"
        )
    definitions: dict[str, Format] = {}
    ways = _calls(tools, forced, definitions) if tools is not None else []
    if not forced:
        ways.append(_tag("<|channel|>final<|message|>", _ANY if own is None else _answer(own, definitions)))
    thoughts = [
        _tag("<|channel|>analysis<|message|>", _ANY, "<|end|>"),
        _tag("<|channel|>commentary<|message|>", _ANY, "<|end|>"),
    ]
    before = {"type": "star", "content": _sequence(_or(*thoughts[: 2 if own is None and tools is not None else 1]), _NEXT)}
    tag = {"type": "structural_tag", "format": _sequence(before, _or(*ways)), "definitions": definitions, "special_only": True}
    return _grammar(tag, own.field if own is not None else "tools")


def _calls(tools: ToolUse, forced: bool, definitions: dict[str, Format]) -> list[Format]:
    """A call of each function, with the recipient behind the channel or before it, as the model and its template write it."""
    ways = []
    for function in tools.functions:
        definitions[function.name] = _arguments(function, forced)
        arguments, to = {"type": "ref", "name": function.name}, f" to=functions.{function.name}"
        ways += [_tag(f"<|channel|>commentary{to} {kind}<|message|>", arguments) for kind in ("<|constrain|>json", "json")]
        ways += [_tag(f"{to}<|channel|>commentary {kind}<|message|>", arguments) for kind in ("<|constrain|>json", "json")]
    return ways


def _arguments(function: Function, forced: bool) -> Format:
    schema: dict[str, Any] = {"type": "object"}
    if forced or function.strict:
        schema = followed_schema(function)
    return {"type": "json_schema", "json_schema": commented(function, schema)}


def _answer(own: StructuredOutputs, definitions: dict[str, Format]) -> Format:
    match own.kind:
        case "json" | "json_object":
            schema = msgspec.json.decode(own.text) if own.text else {"type": "object"}
            noted = {**schema, "$comment": own.field} if isinstance(schema, dict) else schema
            return {"type": "json_schema", "json_schema": noted}
        case "regex":
            return {"type": "regex", "pattern": own.text}
        case "choice":
            return _or(*({"type": "const_string", "value": choice} for choice in msgspec.json.decode(own.text)))
        case "grammar":
            return {"type": "grammar", "grammar": own.text}
    tag = msgspec.json.decode(own.text)
    if "format" in tag:
        definitions.update(tag.get("definitions") or {})
        return tag["format"]  # type: ignore[no-any-return]
    tags = [_tag(s["begin"], {"type": "json_schema", "json_schema": s["schema"]}, s["end"]) for s in tag["structures"]]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _tag(begin: str, content: Format, end: str = "") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _grammar(tag: dict[str, Any], field: str) -> StructuredOutputs:
    try:
        wanted = StructuredOutputs("structural_tag", msgspec.json.encode(tag).decode(), field)
        check_grammar(wanted)
    except RecursionError:
        raise invalid(f"{field}: nested too deeply for a grammar", field) from None
    except ValueError as error:
        nested = "nested" in str(error)
        why = (
            "nested too deeply for a grammar"
            if nested
            else "too long for a grammar; leave some out, or use no strict functions"
        )
        raise invalid(f"{field}: {why}", field) from None
    return wanted
