"""Custom tools of OpenAI's APIs, with a text as their input: towards the model, each is a function with one text argument.

`shown_tools` makes what a chat template shows of a request's tools, and `function_of` checks one. The model's arguments become
the input again in text/custom_calls.py. The format of an input, a Lark grammar or a regex, is told to the model in the tool's
description; a regex is also the argument's pattern, which a forced call follows. A Lark grammar is not enforced: an input comes
as a JSON string, and no grammar of ours describes the escaped form of another one.
"""

from collections.abc import Sequence
from typing import Any

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.left_out import is_left_out, leave_out
from quire.frontend.http.api.tools.tool_use import ToolUse
from quire.frontend.text.custom_calls import INPUT, CustomCalls, Parser

Json = dict[str, Any]
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


def kept_tools(tools: Sequence[Json]) -> list[tuple[int, Json]]:
    """The tools that are not left out, each with its index, and without fields that are null. Raises ApiError 400 for a type
    that is not known."""
    kept = []
    for i, given in enumerate(tools):
        tool = _without_nulls(given)
        kind = tool.get("type", "function")
        if is_left_out(kind):
            leave_out(kind)
        elif kind in ("function", "custom"):
            kept.append((i, tool))
        else:
            raise invalid(f"tools[{i}].type must be 'function' or 'custom'", f"tools[{i}].type")
    return kept


def _without_nulls(tool: Json) -> Json:
    """A tool's own fields and its function's that are not null; what is null in the schema of its arguments is the client's."""
    if None not in tool.values() and not any(isinstance(value, dict) and None in value.values() for value in tool.values()):
        return tool
    return {
        name: {inner: of_it for inner, of_it in value.items() if of_it is not None} if isinstance(value, dict) else value
        for name, value in tool.items()
        if value is not None
    }


def shown_tools(tools: Sequence[Json]) -> list[Json]:
    """The tools as functions, for a chat template. Raises ApiError 400."""
    return [
        {"type": "function", "function": function_of(tool["custom"], f"tools[{i}].custom")} if is_custom(tool) else tool
        for i, tool in kept_tools(tools)
    ]


def is_custom(tool: Json) -> bool:
    return tool.get("type") == "custom" and "custom" in tool


def name_of(tool: Json) -> Any:
    """The name of a function or a custom tool."""
    return tool["custom" if is_custom(tool) else "function"]["name"]


def function_of(custom: Any, place: str) -> Json:
    """A custom tool's function. place: where it is in the body. Raises ApiError 400."""
    if not isinstance(custom, dict):
        raise invalid(f"{place} must be an object with a name", place)
    description = custom.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description must be a text", f"{place}.description")
    texts, argument = [description or ""], {"type": "string", "description": "The whole input, as plain text."}
    if (grammar := _grammar(custom.get("format"), f"{place}.format")) is not None:
        syntax, definition = grammar
        texts.append(f"The input must follow this {_SYNTAXES[syntax]}:\n{definition}")
        if syntax == "regex":
            argument["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT], "additionalProperties": False}
    return {"name": custom.get("name"), "description": "\n\n".join(filter(None, texts)), "parameters": parameters}


def _grammar(value: Any, place: str) -> tuple[str, str] | None:
    """Syntax and definition of a format; None for any text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    grammar = None
    if kind == "grammar":
        grammar = value if value.get("grammar") is None else value["grammar"]
    if (
        not isinstance(grammar, dict)
        or not isinstance(grammar.get("syntax"), str)
        or grammar["syntax"] not in _SYNTAXES
        or not isinstance(grammar.get("definition"), str)
    ):
        raise invalid(
            f"{place} must have the type 'text', or 'grammar' with a syntax, 'lark' or 'regex', and a definition", place
        )
    return grammar["syntax"], grammar["definition"]


def with_custom_calls(parser: Parser, tools: ToolUse | None) -> Parser:
    """The parser, with the inputs of custom tools as their clients read them."""
    customs = frozenset(f.name for f in tools.functions if f.is_custom) if tools is not None else None
    return CustomCalls(parser, customs) if customs else parser
