"""XmlValues: the base of formats that write arguments in tags, as bare text; types come from the function's schema.

A string is passed on as it comes. Any other value is passed on when it is complete, with its type if it can be parsed as that,
else as a string. An end tag after which the call does not continue is part of the value.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.python_values import json_escaped, literal_as_json
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

_NO_TEXTS = {"number", "integer", "boolean", "null"}
_MAX_LOOKS = 32  # checks whether a marker is within a string, for one value: each takes time linear in its length
_MAX_OPTIONS = 64  # options of a parameter's schema that are read
_LONGEST_LITERAL = 1 << 16  # characters of a Python list or dict, which some models write instead of JSON
_SCALARS = {"True": True, "False": False, "None": None}


class XmlValues(ToolParser):
    def _argument(self, reader: Reader, function: str, key: str, ends: Markers) -> Waits[None]:
        """Take a value up to one of its ends, and write it with its key."""
        types = types_of(self._tools.get(function, {}), key)
        reader.write(f'"{json_escaped(key)}": ')
        if types <= {"string"}:
            reader.write('"')
            yield from self._pieces(reader, ends, lambda piece: reader.write(json_escaped(piece)))
            reader.write('"')
        else:
            is_json = "string" not in types and not types <= _NO_TEXTS
            reader.write(as_json((yield from self._whole(reader, ends, is_json)), types))

    def _ends_value(self, reader: Reader, found: str) -> Waits[bool]:
        """Whether the marker that comes next ends the value."""
        raise NotImplementedError

    def _pieces(self, reader: Reader, ends: Markers, write: Callable[[str], None]) -> Waits[None]:
        """Take a value up to its end, and pass each piece to `write`."""
        while True:
            found = yield from reader.pieces_up_to(ends, write)
            if (yield from self._ends_value(reader, found)):
                return
            write(reader.take())

    def _whole(self, reader: Reader, ends: Markers, is_json: bool) -> Waits[str]:
        """Take a value up to its end, and return it. A marker within a JSON string does not count."""
        parts: list[str] = []
        yield from self._pieces(reader, ends, parts.append)
        for _ in range(_MAX_LOOKS if is_json else 0):
            if not _is_in_text("".join(parts)):
                break
            parts.append(reader.take())
            yield from self._pieces(reader, ends, parts.append)
        return "".join(parts)


def _is_in_text(value: str) -> bool:
    """Whether this is the beginning of JSON that ends within a string."""
    try:
        json.loads(value + " ")  # without the space, json would call an escape at the very end, "\\u00e9, invalid
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON Schema's types of one parameter; a string's if the parameter is not known."""
    root = {**schema, **(_resolved(schema, schema) or {})}
    parameter = properties_of(schema).get(key)
    if not isinstance(parameter, dict):
        return frozenset({"string"})
    found, todo, looked = set[str](), [parameter], 0
    while todo and looked < _MAX_OPTIONS:
        option, looked = _resolved(todo.pop(), root), looked + 1
        if option is not None:
            kind = option.get("type")
            found |= {str(k) for k in (_list(kind) or [kind]) if k is not None}
            todo += [o for k in ("anyOf", "oneOf") for o in _list(option.get(k))]
    return frozenset(found or {"any"})


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {**schema, **(_resolved(schema, schema) or {})}.get("properties")
    return properties if isinstance(properties, dict) else {}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a reference at the top of a schema leads to; None if there is no schema."""
    for _ in range(_MAX_OPTIONS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema if isinstance(schema, Mapping) else None
        schema = root
        for part in unquote(ref[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    if "string" in types and not (bare in ("null", "None") and "null" in types):
        return f'"{json_escaped(text)}"'
    if bare in _SCALARS:
        return json.dumps(_SCALARS[bare])
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        is_literal = bare.startswith(("{", "[")) and len(bare) <= _LONGEST_LITERAL
        return (literal_as_json(bare) if is_literal else None) or f'"{json_escaped(text)}"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'"{json_escaped(text)}"'
    return bare
