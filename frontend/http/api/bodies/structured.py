"""Structured output in a body: response_format (OpenAI's), structured_outputs (vLLM's), and vLLM's older guided_* fields.

checked.py calls it. If several fields are set, they must ask for the same, as clients do that support several versions of vLLM;
an ApiError 400 names the field that differs.
"""

import re
from operator import attrgetter
from typing import Any, Protocol, get_args

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.ipc.structured_outputs import Kind, StructuredOutputs
from quire.ipc.structured_outputs_params import structured_message


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """strict: ignored; the schema is always followed."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """type: text, json_object, json_schema, or structural_tag, which has structures and triggers."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: Any = None
    definitions: dict[str, Any] | None = None


class StructuredOutputsFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of StructuredOutputsParams, and others that vLLM's clients send with them."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # no effect: there is one backend
    _backend: str | None = None  # no effect; in vLLM's own object, written as JSON
    _backend_was_auto: bool | None = None


class Body(Protocol):
    """The fields that are read from a body (schemas.SamplingFields)."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputsFields | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def structured_outputs(body: Body) -> StructuredOutputs | None:
    """The format that the output must have; None if no field asks for one. Raises ApiError 400."""
    if (values := _read(body)) == _NOTHING:
        return None
    asked = {name: value for name, value in zip(SOURCES, values, strict=True) if value is not None}
    if isinstance(asked.get("response_format"), ResponseFormat) and body.response_format.type == "text":  # type: ignore[union-attr]
        del asked["response_format"]
    wanted = [structured_field(name, value) for name, value in asked.items()]
    for name, other in zip(asked, wanted, strict=True):
        if msgspec.structs.replace(other, field=wanted[0].field) != wanted[0]:
            first = next(iter(asked))
            raise invalid(f"{name} cannot be combined with {first}, for they ask for different things", name)
    return wanted[0] if wanted else None


def structured_field(name: str, value: Any) -> StructuredOutputs:
    """The format that this field asks for. Raises ApiError 400."""
    try:
        wanted: StructuredOutputs = SOURCES[name](value)
    except ValueError as error:
        raise invalid(f"{name}: {_PREFIX.sub('', str(error))}", name) from None
    return msgspec.structs.replace(wanted, field=_PLACES.get((name, wanted.kind), name))


def _of_response_format(given: ResponseFormat) -> StructuredOutputs:
    match given.type:
        case "json_object":
            return structured_message(json_object=True)
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema is None:
                raise ValueError("type json_schema needs json_schema with name and schema")
            return structured_message(json=given.json_schema.schema)
        case "structural_tag":
            parts = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
            parts["definitions"] = given.definitions
            tag = {name: part for name, part in parts.items() if part is not None}
            return structured_message(structural_tag={"type": "structural_tag", **tag})
    raise ValueError(f"type must be text, json_object, json_schema or structural_tag, got {given.type[:64]!r}")


def _of_structured_outputs(given: StructuredOutputsFields) -> StructuredOutputs:
    return structured_message(
        json=given.json,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=given.json_object,
        structural_tag=given.structural_tag,
        disable_any_whitespace=bool(given.disable_any_whitespace),
        disable_additional_properties=bool(given.disable_additional_properties),
        whitespace_pattern=given.whitespace_pattern,
    )


_PREFIX = re.compile(r"^structured_outputs( \(\w+\))?:? ")
# The path of a grammar of this kind within a field, where it is not the field itself: for errors at its compilation.
_PLACES: dict[tuple[str, Kind], str] = {
    ("response_format", "json"): "response_format.json_schema.schema",
    **{("structured_outputs", kind): f"structured_outputs.{kind}" for kind in get_args(Kind)},
}

SOURCES: dict[str, Any] = {  # field -> reads its value
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": lambda value: structured_message(json=value),
    "guided_regex": lambda value: structured_message(regex=value),
    "guided_choice": lambda value: structured_message(choice=value),
    "guided_grammar": lambda value: structured_message(grammar=value),
}
_read = attrgetter(*SOURCES)
_NOTHING = (None,) * len(SOURCES)
