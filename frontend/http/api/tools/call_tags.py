"""Structural tags of tool calls in a model's own format: for functions with strict: true, and for calls that must be made.

Under tool_choice "auto", text is free up to where the format's parser sees a call begin. From there on the output must be a
call of one of the request's functions, in the model's own syntax; if the function is strict, its arguments follow its schema.
Under "required", and for a named function, the answer begins with a call. Markers that are special tokens may come as such,
or spelled as text (grammar/language/lark.py).

Structural tags are those of enginecore/grammar/language/structural_tag.py. tool_grammar.py calls this.
"""

from collections.abc import Mapping
from typing import Any

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.call_formats import CALL_FORMATS
from quire.frontend.http.api.tools.tag_parts import Format, Functions, sequence
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.gemma import FunctionGemma, Gemma4
from quire.frontend.text.tool_parsers.glm import Glm45, HyV3
from quire.frontend.text.tool_parsers.lfm2 import Lfm2
from quire.frontend.text.tool_parsers.minimax_m2 import MiniMaxM2
from quire.frontend.text.tool_parsers.olmo3 import Olmo3
from quire.frontend.text.tool_parsers.pythonic import Pythonic
from quire.frontend.text.tool_parsers.qwen3_coder import Qwen3Coder

LENIENT = {"lenient": True, "coerce_one_of": True}  # x-guidance: follow what can be followed of a schema
NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})  # keywords with data instead of schemas
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # keys are names
_LINE_BREAKS = {"type": "regex", "pattern": r"\n{0,2}"}  # that templates of reasoning models write before a call


def strict_tag(parser: type[ToolParser], functions: Functions) -> dict[str, Any]:
    """A structural tag for an answer's whole text. Raises ApiError 400 for a function that this syntax cannot call."""
    schemas = {f.name: object_schema(f.parameters) if f.strict else {"type": "object"} for f in functions}
    return _tag(parser, functions, CALL_FORMATS[parser](functions, True), schemas)


def forced_tag(parser: type[ToolParser], use: ToolUse) -> dict[str, Any]:
    """A structural tag for an answer that begins with a call, and has no other if one call alone is allowed or named.

    Schemas of functions that are not strict are followed as far as they can be: a call matters more than its schema. Raises
    ApiError 400 as strict_tag does.
    """
    several = use.mode == "required" and use.parallel is not False
    calls = with_a_call(CALL_FORMATS[parser](use.functions, several), several)
    return _tag(parser, use.functions, sequence([_LINE_BREAKS, calls]), {f.name: followed_schema(f) for f in use.functions})


def with_a_call(answer: Format, several: bool = True) -> Format:
    """The same format with at least one call; with one tag alone if not several."""
    if answer["type"] == "or":
        return {**answer, "elements": [with_a_call(element, several) for element in answer["elements"]]}
    if answer["type"] != "triggered_tags":
        return answer
    return {**answer, "at_least_one": True, **({} if several else {"stop_after_first": True})}


def object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments: an object, an empty one if there are no parameters. Raises ApiError 400."""
    try:
        given: dict[str, Any] = _without_nulls(dict(parameters))
    except RecursionError:
        raise invalid("tools: their parameters are nested too deeply", "tools") from None
    return {"type": "object", **(given or {"properties": {}, "additionalProperties": False})}


def _without_nulls(schema: Any) -> Any:
    """The schema without keywords of the value null, which clients write for keywords that they do not set."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NO_SCHEMAS:
            if value is not None or key in ("const", "default"):
                result[key] = value
        elif key in MAPS and isinstance(value, dict):
            result[key] = {name: {} if inner is None else _without_nulls(inner) for name, inner in value.items()}
        elif value is not None:
            result[key] = _without_nulls(value)
    return result


def followed_schema(function: Function) -> dict[str, Any]:
    schema = object_schema(function.parameters)
    return schema if function.strict else leniently(schema)


def leniently(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, which may be followed only in part."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**LENIENT, **(own if isinstance(own, dict) else {})}}


def commented(function: Function, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its place in the body, for the error if it cannot be compiled (enginecore/grammar/language/places.py)."""
    return {"$comment": f"{function.place}.parameters", **schema}


_STYLES: dict[type[ToolParser], str] = {  # that are not JSON (enginecore/grammar/language/call_arguments.py)
    FunctionGemma: "functiongemma",
    Gemma4: "gemma4",
    Glm45: "glm_xml",
    HyV3: "glm_xml",
    Lfm2: "pythonic",
    MiniMaxM2: "minimax_xml",
    Olmo3: "pythonic",
    Pythonic: "pythonic",
    Qwen3Coder: "qwen_xml",
}


def _tag(
    parser: type[ToolParser], functions: Functions, answer: Format, schemas: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    style = _STYLES.get(parser, "json")
    arguments = {
        f.name: {"type": "json_schema", "json_schema": commented(f, schemas[f.name]), "style": style} for f in functions
    }
    return {"type": "structural_tag", "format": answer, "definitions": arguments}
