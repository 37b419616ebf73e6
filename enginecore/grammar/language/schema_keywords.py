"""Replaces keywords of a JSON Schema that llguidance does not know by ones that it knows, where that means the same.

Schemas made from types are full of them: a dict with keys from an enum (`propertyNames`), an intersection
(`unevaluatedProperties` beside allOf), a keyword that constrains nothing (`"uniqueItems": false`), metaschemas under other
addresses. A keyword that cannot be replaced exactly stays, and llguidance refuses it by its name.

The property of a `discriminator` says which alternative of a oneOf a value is, and readers of the value need it. So
alternatives are made to require it, even where a type has a default for it. That admits less than the schema, all of it valid.

Used by lark.py, in the process that tries grammars.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from quire.enginecore.grammar.language.alternatives import types_of

Resolve = Callable[[str], Any]  # what a `$ref` names, or None

_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]/schema|draft/(?:2019-09|2020-12)/schema)#?")
_REMARKS = frozenset(("title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"))
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_MERGED = frozenset(("type", "properties", "required", "$ref", "allOf")) | _REMARKS  # these at most name properties
_ALTERNATIVES = frozenset(("$ref", "anyOf", "oneOf", "allOf", "discriminator")) | _REMARKS
_KNOWN = frozenset((
    "$schema", "$id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$defs", "definitions", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "properties",
    "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties",
    "unevaluatedProperties", "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains",
    "minItems", "maxItems", "unevaluatedItems", "uniqueItems", "type", "enum", "const", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "x-guidance",
    "discriminator", "title", "description", "$comment", "default", "examples", "readOnly", "writeOnly",
))  # fmt: skip
_OF_ROOTS = {"$schema", "$id", "$defs", "definitions"}
_MAX_DEPTH = 4  # nesting of references and lists


def in_known_words(schema: dict[str, Any], resolve: Resolve, is_inner: bool) -> dict[str, Any]:
    """Replace a schema's own keywords, not those of schemas in it. is_inner: no reference leads into its unknown keywords."""
    made = dict(schema)
    for word in [word for word in made if _bounds_nothing(word, made)]:
        del made[word]
    if "$schema" in made and (dialect := _dialect(made.pop("$schema"))):
        made["$schema"] = dialect
    if made.get("not", False) in ({}, True):
        made = {**_without(made, "not"), "enum": []}
    made = _names_bound(_evaluated(made, resolve), resolve)
    return _alone(made, resolve) if is_inner and not made.keys().isdisjoint(_IN_PLACE) else made


def _without(schema: dict[str, Any], *words: str) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if word not in words}


def _bounds_nothing(word: str, schema: Mapping[str, Any]) -> bool:
    value = schema[word]
    match word:
        case "uniqueItems":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "then" | "else":
            return "if" not in schema
        case "if":
            return "then" not in schema and "else" not in schema
        case "dependentRequired" | "dependentSchemas":
            return value == {}
        case "not":
            return value is False
    return False


def _dialect(address: Any) -> str | None:
    """The address of a metaschema as llguidance knows it. None for unknown ones: those schemas are read as the newest draft."""
    found = _DRAFTS.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        return None
    return f"http://json-schema.org/{found[1]}#" if found[1].startswith("draft-0") else f"https://json-schema.org/{found[1]}"


def _alone(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """A reference or a list of alternatives, without keywords beside it that add nothing: it may be recursive, and then
    llguidance accepts little more than a title beside it."""
    made = {word: value for word, value in schema.items() if word in _KNOWN}
    kinds = made.get("type")
    if kinds is not None and made.keys() - {"type"} <= _ALTERNATIVES:
        beside = types_of({word: value for word, value in made.items() if word != "type"}, resolve)
        if beside <= set(kinds if isinstance(kinds, list) else [kinds]):
            del made["type"]
    return made


# --------------------------------------------------------------------------------------------------------- unevaluated
def _evaluated(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """unevaluatedProperties as additionalProperties, if all that could evaluate a property is beside it or in an allOf."""
    if "unevaluatedProperties" not in schema:
        return schema
    value, made = schema["unevaluatedProperties"], _without(schema, "unevaluatedProperties")
    if "additionalProperties" in made:  # it evaluates all properties
        return made
    if not any(word in made for word in _IN_PLACE):
        return {**made, "additionalProperties": value}
    names = _evaluated_names(made, resolve, 0)
    if value is not False or names is None:
        return schema
    own = made.get("properties", {})
    return {**made, "properties": {**own, **{n: True for n in names if n not in own}}, "additionalProperties": False}


def _evaluated_names(schema: Any, resolve: Resolve, depth: int) -> list[str] | None:
    """The properties that a schema, its allOf and its reference name; None if another keyword may evaluate properties."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH or schema.keys() - _MERGED - (set() if depth else _OF_ROOTS):
        return None
    parts = [resolve(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    names = list(schema["properties"]) if isinstance(schema.get("properties"), dict) else []
    for part in parts:
        if (found := _evaluated_names(part, resolve, depth + 1)) is None:
            return None
        names += found
    return names


# ------------------------------------------------------------------------------------------------------------- names
def _names_bound(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """propertyNames as properties, if it lists names, or as patternProperties."""
    if "propertyNames" not in schema:
        return schema
    made, others = _without(schema, "propertyNames"), schema.get("additionalProperties", True)
    names = _names(schema["propertyNames"], resolve, 0)
    if names is True:
        return made
    if names is None or made.get("patternProperties"):
        return schema
    properties = made.get("properties", {})
    if not isinstance(names, str):
        kept = {name: value if name in names else False for name, value in properties.items()}
        return {**made, "properties": {**kept, **{n: others for n in names if n not in kept}}, "additionalProperties": False}
    return schema if properties else {**made, "patternProperties": {names: others}, "additionalProperties": False}


def _names(schema: Any, resolve: Resolve, depth: int) -> Literal[True] | list[str] | str | None:
    """The names that are allowed: a list of them, a pattern, or True for any. None if they cannot be expressed so."""
    if isinstance(schema, bool):
        return True if schema else []
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    if "string" not in (schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type", "string")]):
        return []
    said = _without(schema, "type", *_REMARKS, *(["format"] if "pattern" in schema else []))
    match said:
        case {"enum": list(values), **rest} if not rest:
            return list(dict.fromkeys(value for value in values if isinstance(value, str)))
        case {"const": value, **rest} if not rest:
            return [value] if isinstance(value, str) else []
        case {"pattern": str(pattern), **rest} if not rest:
            return pattern
        case {"$ref": str(ref), **rest} if not rest:
            return _names(resolve(ref), resolve, depth + 1)
        case {"anyOf": list(parts), **rest} if not rest:
            lists = [found for part in parts if isinstance(found := _names(part, resolve, depth + 1), list)]
            return [name for names in lists for name in names] if len(lists) == len(parts) else None
    least, most = said.pop("minLength", 0), said.pop("maxLength", "")
    if said or not all(n == "" or (isinstance(n, int) and n >= 0) for n in (least, most)):
        return None
    return True if not least and most == "" else f"^[\\s\\S]{{{least},{most}}}$"


# ----------------------------------------------------------------------------------------------------- discriminators
def with_discriminator(schema: dict[str, Any], resolve: Resolve, define: Callable[[str, Any], str]) -> dict[str, Any]:
    """A schema in which the alternatives of oneOf require the property that the discriminator names, if they list it. define:
    adds a definition, for an alternative that is a reference, and returns the reference to it."""
    parts, told_by = schema.get("oneOf"), schema.get("discriminator")
    name = told_by.get("propertyName") if isinstance(told_by, dict) else None
    if not isinstance(parts, list) or not isinstance(name, str):
        return _without(schema, "discriminator") if isinstance(told_by, dict) else schema
    made = []
    for part in parts:
        ref = part["$ref"] if isinstance(part, dict) and isinstance(part.get("$ref"), str) and len(part) == 1 else None
        required = _requiring(part if ref is None else resolve(ref), name)
        made.append(part if required is None else required if ref is None else {"$ref": define(f"{ref} {name}", required)})
    return {**_without(schema, "discriminator"), "oneOf": made}


def _requiring(schema: Any, name: str) -> dict[str, Any] | None:
    """A schema that lists a property and does not require it, changed to require it. None for other schemas."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict) or name not in schema["properties"]:
        return None
    required = schema.get("required", [])
    return {**schema, "required": [*required, name]} if isinstance(required, list) and name not in required else None
