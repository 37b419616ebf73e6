"""Grammars that make sure of calls: JSON Schemas for "required" and for a named function, a structural tag for strict ones.

What follows them is read by tool_parsers/forced.py and by the parser of the model's own format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tool_use import Function, ToolUse
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.hermes import START, Hermes
from quire.ipc.structured_outputs import StructuredOutputs

_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})  # keywords whose values hold data, not schemas
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # keys are names


def tool_grammar(use: ToolUse, parser: type[ToolParser] | None) -> StructuredOutputs | None:
    """What the output must be; None if it is free. parser: of the model's own format, for "auto". Raises ApiError 400."""
    try:
        if use.mode == "named":
            return _grammar("json", _object(use.functions[0].parameters))
        if use.mode == "required":
            return _grammar("json", required_schema(use.functions, use.parallel))
        if parser is Hermes and any(function.strict for function in use.functions):
            return _grammar("structural_tag", structural_tag(use.functions))
    except RecursionError:
        raise invalid("tools: their parameters are nested too deeply", "tools") from None
    return None


def required_schema(functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
    """A list of calls, `{"name": ..., "parameters": {...}}`, at least one."""
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        definitions[f"tool{i}"] = moved(_object(function.parameters), f"#/$defs/tool{i}")
        properties = {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/tool{i}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls} if len(calls) > 1 else calls[0], "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def structural_tag(functions: Sequence[Function]) -> dict[str, Any]:
    """Text as the model likes, in which each call is of one of the functions, a strict one's with arguments by its schema."""
    structures = []
    for function in functions:
        begin, end = Hermes.frame
        schema = _object(function.parameters) if function.strict else {"type": "object"}
        structures.append({"begin": begin % f'"{function.name}"', "schema": schema, "end": end})
    return {"type": "structural_tag", "structures": structures, "triggers": [START]}


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of an object; no parameters at all are an empty one."""
    return {"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})}


def moved(schema: Any, to: str) -> Any:
    """A schema whose references within itself ("#/...") are right when it stands at this place of another one."""
    if isinstance(schema, list):
        return [moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NO_SCHEMAS:
            result[key] = value
        elif key in _MAPS and isinstance(value, dict):
            result[key] = {name: moved(inner, to) for name, inner in value.items()}
        elif key in ("$ref", "$dynamicRef") and isinstance(value, str) and value.startswith("#") and value[1:2] in ("", "/"):
            result[key] = to + value[1:]
        else:
            result[key] = moved(value, to)
    return result


def _grammar(kind: Any, value: Any) -> StructuredOutputs:
    try:
        return StructuredOutputs(kind, msgspec.json.encode(value).decode())
    except ValueError:
        raise invalid("tools: their parameters are too long for a grammar; leave some out, or use tool_choice 'auto'",
                      "tools") from None  # fmt: skip
