"""Finds out whether the alternatives of a JSON Schema's oneOf exclude each other, through references: then it means anyOf.

llguidance compares alternatives that are written in place, but not behind a `$ref`, and schemas made from types write unions
so. The answer is sound but not complete: if it is yes, no value matches two alternatives. They are compared by their types,
their const or enum, properties that both require, and properties that one requires and the other forbids. Keywords next to a
`$ref` are ignored, so it does not matter that older drafts ignore them, too.

Used by lark.py, in the process that tries grammars.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MAX_WAYS = 64  # ways to match one schema; if there are more, some of what it says is ignored
_MAX_ALTERNATIVES = 256  # ways of all alternatives together
_MAX_DEPTH = 12  # nesting of references and lists of alternatives
_MAX_PROPERTIES = 3  # nesting of properties that are compared
_MAX_COMPARED = 100_000  # pairs of ways
_DEEP, _MAX_LOOKED = 2, 2_000  # this depth; schemas looked at below it: references in all directions would grow without end


class Way(NamedTuple):
    """Facts that hold for every value that matches a schema in one way; the defaults say nothing."""

    types: frozenset[str] = _TYPES  # integers are numbers
    values: frozenset[str] | None = None  # all possible values, as JSON; None: any
    required: frozenset[str] = frozenset()
    properties: tuple[tuple[str, Any], ...] = ()  # names and their schemas; a name may occur twice
    closed: tuple[frozenset[str], ...] = ()  # sets of names: an object has no property outside any of them

    def and_(self, other: "Way") -> "Way":
        values = other.values if self.values is None else self.values if other.values is None else self.values & other.values
        return Way(
            self.types & other.types,
            values,
            self.required | other.required,
            self.properties + other.properties,
            self.closed + other.closed,
        )


def exclude_each_other(schema: Mapping[str, Any], resolve: Callable[[str], Any]) -> bool:
    """Whether no value matches two of a schema's oneOf, as far as can be told. resolve: finds what a `$ref` names, or None."""
    looked = _Looked(resolve)
    beside = looked.ways({key: value for key, value in schema.items() if key not in ("oneOf", "$ref")}, 0)
    alternatives = [looked.product(beside, looked.ways(part, 1)) for part in schema["oneOf"]]
    if sum(map(len, alternatives)) > _MAX_ALTERNATIVES:
        return False
    return all(looked.are_apart(one, other, 0) for one, other in combinations(alternatives, 2))


def types_of(schema: Mapping[str, Any], resolve: Callable[[str], Any]) -> frozenset[str]:
    """The types that a value of a schema may have, as far as can be told; integers are numbers."""
    return frozenset[str]().union(*(way.types for way in _Looked(resolve).ways(schema, 0)))


def resolver(root: Mapping[str, Any]) -> Callable[[str], Any]:
    """A function that finds what a JSON pointer like #/$defs/name names in a schema. It returns None for other references, and
    for all of them if a part of the schema has an $id of its own, because pointers in that part are relative to it."""
    if json.dumps(root).count('"$id"') > ("$id" in root):
        return lambda ref: None

    def resolve(ref: str) -> Any:
        if ref != "#" and not ref.startswith("#/"):
            return None
        found: Any = root
        for name in unquote(ref).split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found

    return resolve


class _Looked:
    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._num_compared = self._num_looked = 0

    def ways(self, schema: Any, depth: int) -> list[Way]:
        if schema is False:
            return []
        self._num_looked += depth > _DEEP
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_looked > _MAX_LOOKED or "$id" in schema:
            return [Way()]
        if "$ref" in schema:
            ref = schema["$ref"]
            return self.ways(self._resolve(ref) if isinstance(ref, str) else None, depth + 1)
        found = [_own(schema)]
        for part in _list(schema.get("allOf")):
            found = self.product(found, self.ways(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema.get(key)):
                found = self.product(found, [way for part in parts for way in self.ways(part, depth + 1)])
        return found

    def product(self, some: list[Way], others: list[Way]) -> list[Way]:
        if len(some) * len(others) > _MAX_WAYS:
            return some or others  # too many: `others` are ignored
        return [one.and_(other) for one in some for other in others]

    def are_apart(self, some: list[Way], others: list[Way], depth: int) -> bool:
        self._num_compared += len(some) * len(others)
        if depth > _MAX_PROPERTIES or self._num_compared > _MAX_COMPARED:
            return False
        return all(self._differ(one, other, depth) for one in some for other in others)

    def _differ(self, one: Way, other: Way, depth: int) -> bool:
        types = one.types & other.types
        if not types or (one.values is not None and other.values is not None and not one.values & other.values):
            return True
        if types != {"object"}:
            return False
        if any(a.required - names for a, b in ((one, other), (other, one)) for names in b.closed):
            return True
        return any(self.are_apart(self.ways(mine, 0), self.ways(theirs, 0), depth + 1) for mine, theirs in _pairs(one, other))


def _own(schema: Mapping[str, Any]) -> Way:
    """The way that a schema itself describes, without references and lists of alternatives."""
    types, values, required = _TYPES, None, frozenset[str]()
    properties: tuple[tuple[str, Any], ...] = ()
    closed: tuple[frozenset[str], ...] = ()
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types = _TYPES & {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    literals = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if literals and not any(isinstance(value, float | list | dict) for value in literals):
        values = frozenset(map(json.dumps, literals))
        types &= {_type_of(value) for value in literals}
    if all(isinstance(name, str) for name in _list(schema.get("required"))):
        required = frozenset(_list(schema.get("required")))
    if isinstance(schema.get("properties"), dict):
        properties = tuple(schema["properties"].items())
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        closed = (frozenset(name for name, _ in properties),)
    return Way(types, values, required, properties, closed)


def _type_of(value: Any) -> str:
    return (
        "null" if value is None else "boolean" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
    )


def _pairs(one: Way, other: Way) -> Iterator[tuple[Any, Any]]:
    """Pairs of schemas of the same property, for properties that both ways require."""
    for name, mine in one.properties:
        if name in one.required and name in other.required:
            yield from ((mine, theirs) for theirs_name, theirs in other.properties if theirs_name == name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
