"""StructuredOutputsParams: vLLM's form of a constraint on an output. `to_message` makes the message to the core.

    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

It is for users of Python, who may read and set its fields. The HTTP routes make the message directly from their bodies' fields.
"""

import dataclasses
from dataclasses import KW_ONLY
from typing import Any

import msgspec

from quire.ipc.struct_errors import FieldErrors
from quire.ipc.structured_outputs import Kind, StructuredOutputs, check_grammar

_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SCHEMAS = {
    "additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "unevaluatedItems", "not", "if", "then",
    "else", "items", "prefixItems", "allOf", "anyOf", "oneOf",
}  # fmt: skip
_CLOSED_BY = ("properties", "patternProperties")


@dataclasses.dataclass
class StructuredOutputsParams(metaclass=FieldErrors):
    """One of: json, a JSON Schema, as text or dict; regex, for the whole output; choice, a list of texts; grammar, in Lark or
    EBNF; json_object True, any JSON object; structural_tag, as text or dict.

    Options for JSON only: disable_any_whitespace, no whitespace between tokens (otherwise a space, or a line break and an
    indentation); whitespace_pattern, a regex of the allowed whitespace; disable_additional_properties, only named properties.
    disable_fallback is vLLM's switch for its other backends; Quire has one backend.
    Raises ValueError for none or several of the first group, an option without meaning, a text that is too long or too nested.
    Fields that are set later are checked when a request is sent.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    _: KW_ONLY
    structural_tag: str | dict[str, Any] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.to_message()

    def to_message(self) -> StructuredOutputs:
        """The form that travels. Raises ValueError as the constructor does."""
        fields = dict(vars(self))
        del fields["disable_fallback"]
        return structured_message(**fields)


def structured_message(
    *,
    json: str | dict[str, Any] | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    structural_tag: str | dict[str, Any] | None = None,
    disable_any_whitespace: bool = False,
    disable_additional_properties: bool = False,
    whitespace_pattern: str | None = None,
) -> StructuredOutputs:
    """Make the message from StructuredOutputsParams' fields. 6 ms for the longest text. Raises ValueError as that does."""
    given = {
        "json": json, "regex": regex, "choice": choice, "grammar": grammar,
        "json_object": json_object or None, "structural_tag": structural_tag,
    }  # fmt: skip
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"structured_outputs needs exactly one of {', '.join(given)}; got {', '.join(names) or 'none'}")
    kind: Kind = names[0]  # type: ignore[assignment]
    options: dict[str, Any] = {}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    elif disable_any_whitespace:
        options["whitespace_flexible"] = False
    is_json = kind in ("json", "json_object")
    if (options or disable_additional_properties) and not is_json:
        raise ValueError("structured_outputs: whitespace and additional properties are options of json and json_object")
    if kind == "json_object" and options:
        kind, json = "json", {"type": "object"}
    wanted = StructuredOutputs(
        kind, _text(kind, json if kind == "json" else given[kind], options, disable_additional_properties)
    )
    check_grammar(wanted)
    return wanted


def _text(kind: Kind, value: Any, options: dict[str, Any], closed: bool) -> str:
    if kind == "json_object":
        return ""
    if kind == "json" and (options or closed):
        schema = _decoded(value) if isinstance(value, str) else value
        schema = _without_additional(schema) if closed else schema
        value = {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}} if isinstance(schema, dict) else schema
    if isinstance(value, str) and kind != "choice":
        if kind in ("json", "structural_tag"):
            _decoded(value)
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: {kind} cannot be written as JSON: {error}") from None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: it is not JSON: {error}") from None


def _without_additional(schema: Any) -> Any:
    """The schema with additionalProperties false where it names properties and does not mention others."""
    if isinstance(schema, list):
        return [_without_additional(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            made[name] = {key: _without_additional(part) for key, part in value.items()}
        else:
            made[name] = _without_additional(value) if name in _SCHEMAS else value
    if any(isinstance(schema.get(name), dict) for name in _CLOSED_BY):
        made.setdefault("additionalProperties", False)
    return made
