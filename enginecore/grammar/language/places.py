"""Finds the place in a user's grammar that is wrong: llguidance says what it cannot do, but seldom in which part.

So the parts are tried by themselves, outer ones first: the schemas, regexes and grammars in a structural tag, and the schemas
in a JSON Schema. Runs in the process that tries grammars (trial.py), after one has failed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.enginecore.grammar.language.tag_formats import field_of, parts_of
from quire.ipc.structured_outputs import StructuredOutputs

_KEYWORD = re.compile(r" for '(\w+)', got ")  # as llguidance's errors name it
LOOK_S = 0.5  # to find the place; after that, what is known by then is used
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_ONES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


def with_place(wanted: StructuredOutputs, error: str, error_of: Callable[[StructuredOutputs], str]) -> str:
    """The error of a grammar, with the place that it comes from if that is found. error_of: returns "" for a valid grammar."""
    deadline = time.monotonic() + LOOK_S

    def failing(parts: Iterator[tuple[str, StructuredOutputs]], same: bool) -> tuple[str, StructuredOutputs, str] | None:
        for place, part in parts:
            if time.monotonic() > deadline:
                return None
            if (found := error_of(part)) and (found == error or not same):
                return place, part, found
        return None

    places: list[str] = []
    if wanted.kind == "structural_tag" and (found := failing(parts_of(json.loads(wanted.text)), False)):
        place, wanted, error = found
        places.append(field_of(json.loads(wanted.text)) or place if wanted.kind == "json" else place)
    schema: Any = json.loads(wanted.text) if wanted.kind == "json" else None
    root = schema
    while isinstance(schema, dict) and (found := failing(_inner(schema, root), True)):
        place, part, error = found
        schema = json.loads(part.text)
        field = field_of(schema)
        places = [*places, place] if field is None else [field]
    if isinstance(schema, dict) and (keyword := _KEYWORD.search(error)) and keyword[1] in schema:
        places.append(f"/{keyword[1]}")
    return _joined(places, error)


def _joined(places: list[str], error: str) -> str:
    """As in `tools[0].function.parameters: at #/properties/a/items: ...`."""
    whole = [place for place in places if not place.startswith("/")]
    pointer = "".join(place for place in places if place.startswith("/"))
    return ": ".join([*whole, *([f"at #{pointer}"] if pointer else []), error])


def _leads_out(schema: dict[str, Any]) -> bool:
    """Whether it refers to something other than a definition, which it lacks when it stands alone."""
    ref = schema.get("$ref")
    return isinstance(ref, str) and ref.startswith("#") and not ref.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))


def _inner(schema: dict[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[str, StructuredOutputs]]:
    """The schemas directly in one, as (pointer, schema); each stands alone, with the definitions that it may refer to."""
    pairs: list[tuple[str, Any]] = []
    for key in (*_DEFINITIONS, *_MAPS) if schema is root else _MAPS:
        if isinstance(schema.get(key), dict):
            pairs += [(f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", value) for name, value in schema[key].items()]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            pairs += [(f"/{key}/{i}", value) for i, value in enumerate(schema[key])]
    pairs += [(f"/{key}", schema[key]) for key in _ONES if key in schema]
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    for pointer, value in pairs:
        if isinstance(value, dict) and not _leads_out(value):
            yield pointer, StructuredOutputs("json", json.dumps({**value, **definitions}))
