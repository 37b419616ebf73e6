"""Grammars that guarantee valid calls: structural tags in the model's own format, for forced calls and for strict functions.

If no parser is known for the model, a call that must be made is JSON instead, which tool_parsers/forced.py reads. A model was
not trained to write it, so such a list holds one call unless the request asks for several. call_tags.py has the tags, which
the parser of the model's format reads.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.call_tags import (
    commented,
    followed_schema,
    forced_tag,
    leniently,
    object_schema,
    strict_tag,
    with_a_call,
)
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.llama3_json import Llama3Json
from quire.ipc.structured_outputs import StructuredOutputs, check_grammar

_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})  # keywords with data instead of schemas
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # keys are names


def tool_grammar(use: ToolUse, parser: type[ToolParser] | None) -> StructuredOutputs | None:
    """The grammar of the output; None if it is free. parser: the model's own format, if it is known. Raises ApiError 400."""
    try:
        if use.mode != "auto" and parser is not None:
            return _grammar("structural_tag", forced_tag(parser, use), "tools")
        if use.mode == "named":
            function = use.functions[0]
            return _grammar("json", followed_schema(function), f"{function.place}.parameters")
        if use.mode == "required":
            schema = required_schema(use.functions, use.parallel is True)
            is_strict = any(function.strict for function in use.functions)
            return _grammar("json", schema if is_strict else leniently(schema), "tools")
        if parser is not None and any(function.strict for function in use.functions):
            return _grammar("structural_tag", strict_tag(parser, use.functions), "tools")
    except RecursionError:
        raise invalid("tools: their parameters are nested too deeply", "tools") from None
    return None


def answer_or_calls(answer: StructuredOutputs, use: ToolUse, parser: type[ToolParser]) -> StructuredOutputs:
    """The grammar for an answer in JSON under tool_choice "auto": such an answer, or calls in the model's own format.

    It is the answer's alone if the calls cannot be described by a grammar, or are JSON themselves. Raises ApiError 400 for a
    strict function that cannot be described.
    """
    if parser is Llama3Json:
        return answer
    try:
        tag = strict_tag(parser, use.functions)
        schema = {**msgspec.json.decode(answer.text or "{}"), **({} if answer.text else {"type": "object"})}
        either = [{"type": "json_schema", "json_schema": {**schema, "$comment": answer.field}}, with_a_call(tag["format"])]
        return _grammar("structural_tag", {**tag, "format": {"type": "or", "elements": either}}, "tools")
    except ApiError:
        if any(function.strict for function in use.functions):
            raise
        return answer


def required_schema(functions: Sequence[Function], several: bool) -> dict[str, Any]:
    """The schema of a list of calls, `{"name": ..., "parameters": {...}}`, with one call, or with several."""
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        parameters = _moved(object_schema(function.parameters), f"#/$defs/tool{i}")
        definitions[f"tool{i}"] = commented(function, parameters)
        properties = {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/tool{i}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls} if len(calls) > 1 else calls[0], "$defs": definitions}
    return schema if several else {**schema, "maxItems": 1}


def _moved(schema: dict[str, Any], to: str) -> dict[str, Any]:
    """A schema to be put at the place `to` in another one: without its $id, with references relative to the new place."""
    address = schema.get("$id")
    inner = {key: value for key, value in schema.items() if key != "$id"}
    return _referred(inner, address if isinstance(address, str) else "", to)  # type: ignore[no-any-return]


def _referred(schema: Any, address: str, to: str) -> Any:
    """The schema with its inner references ("#/...", also after its address) moved to the place `to`. A subschema with an $id
    of its own is unchanged: its references are relative to that."""
    if isinstance(schema, list):
        return [_referred(item, address, to) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NO_SCHEMAS:
            result[key] = value
        elif key in _MAPS and isinstance(value, dict):
            result[key] = {name: _referred(inner, address, to) for name, inner in value.items()}
        elif key in ("$ref", "$dynamicRef") and isinstance(value, str):
            own = value.removeprefix(address)
            result[key] = to + own[1:] if own.startswith("#") and own[1:2] in ("", "/") else value
        else:
            result[key] = _referred(value, address, to)
    return result


def _grammar(kind: Any, value: Any, field: str) -> StructuredOutputs:
    try:
        wanted = StructuredOutputs(kind, msgspec.json.encode(value).decode(), field)
        check_grammar(wanted)
    except ValueError as error:
        if "nested" in str(error):
            raise invalid(f"{field}: nested too deeply for a grammar", field) from None
        raise invalid("tools: their parameters are too long for a grammar; leave some out, or use tool_choice 'auto' without "
                      "strict", "tools") from None  # fmt: skip
    return wanted
