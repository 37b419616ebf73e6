"""Arguments as Gemma 4 and FunctionGemma write them, by the function's JSON Schema, as the body of a rule.

    {KEY:<|"|>TEXT<|"|>,KEY:5,KEY:[...],KEY:{...}}

Texts stand between two marks and have no escapes, so values of all depths are written here. Numbers, true, false and null are
as in JSON. Properties come in the order in which the models' templates write them: the alphabet's. A schema that cannot
be followed is refused. frontend/text/tool_parsers/gemma.py reads this back; call_arguments.py calls it.
"""

import re
from collections.abc import Mapping
from typing import Any

from quire.enginecore.grammar.language.argument_schemas import any_text, is_names, json_value, kinds_of, resolved, text_body
from quire.enginecore.grammar.language.lark import Writer, quoted

QUOTES = {"gemma4": '<|"|>', "functiongemma": "<escape>"}
_MAX_DEPTH = 32
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("minLength", "maxLength", "pattern")
_ARRAYS = ("items", "minItems", "maxItems")
_OBJECTS = ("properties", "required", "additionalProperties")
_NOTES = frozenset(("$comment", "$defs", "$id", "$ref", "$schema", "default", "definitions", "deprecated", "description"))
_NOTES |= {"examples", "format", "readOnly", "title", "writeOnly", "x-guidance"}
_KEY = re.compile(r"(?! )[^:,{}\[\]<>\n\"]+(?<! )")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def gemma_arguments(quote: str, schema: Any, writer: Writer) -> str:
    whole = {} if schema is True else schema
    if not isinstance(whole, dict):
        raise ValueError("a JSON Schema must be an object")
    return _Gemma(quote, whole, writer).value("arguments", {"type": "object", **resolved(whole, whole)}, 0)


class _Gemma:
    """name: the property's name, for errors."""

    def __init__(self, quote: str, root: Mapping[str, Any], writer: Writer) -> None:
        self._quote = quote
        self._root = dict(root)
        self._w = writer

    def value(self, name: str, schema: Any, depth: int) -> str:
        if schema is False or depth > _MAX_DEPTH:
            raise ValueError(f"{name!r} cannot be followed in this syntax")
        found = resolved(schema, self._root) if isinstance(schema, dict) else {}
        if "enum" in found or "const" in found:
            self._check(name, found, ("enum", "const", "type"))
            return self._one_of(name, found)
        if options := [key for key in ("anyOf", "oneOf") if key in found]:
            if beyond := sorted(found.keys() - _NOTES - set(options[:1])):
                raise ValueError(f"{options[0]} of {name!r} cannot be followed in this syntax beside {beyond[0]}")
            return self._options(name, found[options[0]], options[0] == "oneOf", depth)
        kind = found.get("type")
        if kind is None:
            self._check(name, found, ())
            return self._anything()
        kinds = kind if isinstance(kind, list) else [kind]
        self._check(name, found, ("type", *_NUMBERS, *_TEXTS, *_ARRAYS, *_OBJECTS))
        ways = [self._of_kind(name, str(one), found, depth) for one in kinds]
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _check(self, name: str, found: Mapping[str, Any], known: Any) -> None:
        if beyond := sorted(found.keys() - _NOTES - set(known)):
            raise ValueError(f"{beyond[0]} of {name!r} cannot be followed in this syntax")

    def _options(self, name: str, options: Any, exclusive: bool, depth: int) -> str:
        if not isinstance(options, list) or not options:
            raise ValueError(f"the options of {name!r} must be a list")
        if exclusive:
            kinds = [kinds_of(option, self._root) for option in options]
            seen = [("number" if kind == "integer" else kind) for each in kinds for kind in each]
            if not all(kinds) or len(set(seen)) < len(seen):
                raise ValueError(f"oneOf of {name!r} cannot be followed in this syntax: its options may overlap")
        ways = [self.value(name, option, depth + 1) for option in options]
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _of_kind(self, name: str, kind: str, found: dict[str, Any], depth: int) -> str:
        if kind == "string":
            body = text_body({key: found[key] for key in _TEXTS if key in found}, self._quote, self._root)
            return self._text(None if body is None else self._w.token(body))
        if kind == "array":
            return self._array(name, found, depth)
        if kind == "object":
            return self._object(name, found, depth)
        return self._w.rule(
            json_value(name, {"type": kind, **{key: found[key] for key in _NUMBERS if key in found}}, self._root)
        )

    def _text(self, body: str | None) -> str:
        mark = self._w.literal(self._quote)
        return self._w.rule(f"{mark} {any_text(self._quote, self._w)}" if body is None else f"{mark} {body} {mark}")

    # --------------------------------------------------------------------------------------------------- lists and objects
    def _array(self, name: str, found: Mapping[str, Any], depth: int) -> str:
        low, high = int(found.get("minItems", 0)), found.get("maxItems")
        if high is not None and int(high) < low:
            raise ValueError(f"{name!r} has no valid length")
        if high == 0:
            return '"[" "]"'
        item = self.value(name, found.get("items", True), depth + 1)
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else int(high) - 1}}}'
        return self._w.rule(f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"')

    def _object(self, name: str, found: Mapping[str, Any], depth: int) -> str:
        properties, required = found.get("properties") or {}, found.get("required") or []
        others = found.get("additionalProperties", True)
        if not isinstance(properties, dict) or not is_names(required):
            raise ValueError("`properties` must be an object, and `required` a list of texts")
        names = {key: value for key, value in properties.items() if value is not False or key in required}
        names |= {str(key): others for key in required if key not in properties}
        if not names and others is not False:
            value = self._anything() if others is True else self.value(name, others, depth + 1)
            return self._w.rule(f'"{{" ({self._pair(value)} ("," {self._pair(value)})*)? "}}"')
        first, rest = '""', '""'  # rules of the properties that follow: if none is written yet, and if one is
        for key in sorted(names, key=str.lower, reverse=True):
            if not _KEY.fullmatch(key):
                raise ValueError(f"a parameter of the name {key!r} cannot be written in this syntax")
            pair = self._w.rule(f"{quoted(key + ':')} {self.value(key, names[key], depth + 1)}")
            is_needed = key in required
            first, rest = (
                self._w.rule(f"{pair} {rest}" if is_needed else f"{pair} {rest} | {first}"),
                self._w.rule(f'"," {pair} {rest}' if is_needed else f'("," {pair})? {rest}'),
            )
        return self._w.rule(f'"{{" {first} "}}"')

    def _pair(self, value: str) -> str:
        key = self._w.token(r"/[\p{L}_][\p{L}\p{Nd}_]{0,127}/")
        return f'{key} ":" {value}'

    # ----------------------------------------------------------------------------------------------------- values as given
    def _anything(self) -> str:
        """The name of a rule for any value."""
        name = "gemma_value"
        word = self._w.token(r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/")
        pair = self._pair(name)
        self._w.define(
            name, f'{word} | {self._text(None)} | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
        )
        return name

    def _one_of(self, name: str, found: Mapping[str, Any]) -> str:
        kind = found.get("type")
        kinds = set(kind if isinstance(kind, list) else [kind] if kind is not None else _TYPES.values())
        kinds |= {"integer"} if "number" in kinds else set()
        values = found.get("enum", [found.get("const")])
        if "const" in found and "enum" in found:
            values = [value for value in values if value == found["const"]]
        ways = [way for v in values if _TYPES.get(type(v)) in kinds and (way := self._written(v)) is not None]
        if not ways:
            raise ValueError(f"none of the values of {name!r} can be written")
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _written(self, value: Any) -> str | None:
        """A value as the body of a rule; None if it cannot be written."""
        if isinstance(value, str):
            mark = self._w.literal(self._quote)
            return None if self._quote in value else f"{mark} {quoted(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, list | dict):
            return None
        return self._w.rule(json_value("", {"const": value}, {}))
