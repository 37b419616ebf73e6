"""Qwen3-Coder's XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Values are bare text: their types come from the function's schema. A string is passed on as it comes, without the line breaks
around it. Any other value is passed on when it is complete, with its type if it can be parsed as that, else as a string. Some
models omit the outer tags, or a value's end tag. So a value also ends at the beginning of a parameter that the function has and
the call does not have yet, and at the end of the call. The beginning of any other parameter is part of the value, and so is an
end tag after which the call does not continue. Seed-OSS has other outer tags.
"""

import json
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.frontend.text.tool_parsers.base import Parameters, ToolParser
from quire.frontend.text.tool_parsers.python_values import json_escaped, literal_as_json
from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits

START, END = "<tool_call>", "</tool_call>"
STARTS, ENDS = (START, "<seed:tool_call>"), (END, "</seed:tool_call>")
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME_ENDS = Markers(">")
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, *(f"\n{FUNCTION_END}\n{end}" for end in ENDS))
_BEHIND_VALUES = (PARAMETER, FUNCTION_END, *ENDS, *STARTS, FUNCTION)  # a value's end marker is followed by one of these
_NO_TEXTS = {"number", "integer", "boolean", "null"}
_MAX_LOOKS = 32  # checks whether a marker is within a string, for one value: each takes time linear in its length
_MAX_OPTIONS = 64  # options of a parameter's schema that are read
_MAX_ENDS = 256  # parameters of a function that may end another's value
_LONGEST_LITERAL = 1 << 16  # characters of a Python list or dict, which some models write instead of JSON
_SCALARS = {"True": True, "False": False, "None": None}


class Qwen3Coder(ToolParser):
    starts = Markers(*STARTS, FUNCTION)
    special = (*STARTS, *ENDS)

    def __init__(
        self,
        tools: Mapping[str, Parameters] | None = None,
        new_id: Callable[[], str] | None = None,
        is_forced: bool = False,
    ) -> None:
        super().__init__(tools, new_id, is_forced)
        self._value_ends: dict[str, Markers] = {}
        self._begun: set[str] = set()  # the beginnings of the parameters that the call has so far

    def _call(self, reader: Reader) -> Waits[None]:
        for start in STARTS:
            if (yield from reader.optional(start)):
                yield from reader.skip_space()
                break
        yield from self._function(reader)
        yield from reader.skip_space()
        for end in ENDS:
            if (yield from reader.optional(end)):
                return reader.close()
        reader.give_back()

    def _function(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(FUNCTION)
        name = (yield from reader.up_to(_NAME_ENDS)).strip()
        yield from reader.expect(">")
        yield from reader.skip_space()
        has_more = yield from reader.looks_like(PARAMETER)
        if not name or not (has_more or (yield from reader.looks_like(FUNCTION_END))):
            raise Malformed
        reader.begin(name, verbatim=False)
        reader.write("{")
        self._begun.clear()
        first = True
        while has_more:
            yield from self._parameter(reader, name, "" if first else ", ")
            first = False
            yield from reader.skip_space()
            has_more = yield from reader.looks_like(PARAMETER)
        for next_one in (*ENDS, *STARTS, FUNCTION):
            if (yield from reader.looks_like(next_one)):
                break
        else:
            yield from reader.expect(FUNCTION_END)
        reader.write("}")
        reader.end_arguments()

    def _parameter(self, reader: Reader, function: str, separator: str) -> Waits[None]:
        yield from reader.expect(PARAMETER)
        key = (yield from reader.up_to(_NAME_ENDS)).strip()
        yield from reader.expect(">")
        if (yield from reader.peek()) == "\n":
            reader.take()
        self._begun.add(_beginning(key))
        types, ends = _types(self._tools.get(function, {}), key), self._ends(function)
        reader.write(f'{separator}"{json_escaped(key)}": ')
        if types <= {"string"}:
            reader.write('"')
            yield from self._pieces(reader, ends, lambda piece: reader.write(json_escaped(piece)))
            reader.write('"')
        else:
            reader.write(
                _as_json((yield from self._value(reader, ends, "string" not in types and not types <= _NO_TEXTS)), types)
            )
        yield from reader.skip_space()  # the line break
        if not (yield from reader.looks_like(PARAMETER)) and not (yield from reader.looks_like(FUNCTION_END)):
            yield from reader.expect(PARAMETER_END)

    def _ends(self, function: str) -> Markers:
        """The markers that may end a value of the function's parameters."""
        if function not in self._value_ends:
            names = islice(_properties(self._tools.get(function, {})), _MAX_ENDS)
            self._value_ends[function] = Markers(*_VALUE_ENDS, *(_beginning(name) for name in names if ">" not in name))
        return self._value_ends[function]

    def _pieces(self, reader: Reader, ends: Markers, write: Callable[[str], None]) -> Waits[None]:
        """Take a value up to its end, and pass each piece to `write`."""
        while True:
            found = yield from reader.pieces_up_to(ends, write)
            is_value_end = found.endswith(PARAMETER_END)
            if found not in self._begun and (not is_value_end or (yield from reader.is_followed(found, _BEHIND_VALUES))):
                return
            write(reader.take())

    def _value(self, reader: Reader, ends: Markers, is_json: bool) -> Waits[str]:
        """Take a value up to its end, and return it. A marker within a JSON string does not count."""
        parts: list[str] = []
        yield from self._pieces(reader, ends, parts.append)
        for _ in range(_MAX_LOOKS if is_json else 0):
            if not _is_in_text("".join(parts)):
                break
            parts.append(reader.take())
            yield from self._pieces(reader, ends, parts.append)
        return "".join(parts)


def _beginning(key: str) -> str:
    """The beginning of a parameter, after another one's value."""
    return f"\n{PARAMETER}{key}>"


def _is_in_text(value: str) -> bool:
    """Whether this is the beginning of JSON that ends within a string."""
    try:
        json.loads(value + " ")  # without the space, json would call an escape at the very end, "\\u00e9, invalid
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON Schema's types of one parameter; a string's if the parameter is not known."""
    root = {**schema, **(_resolved(schema, schema) or {})}
    parameter = _properties(schema).get(key)
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


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
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


def _as_json(text: str, types: frozenset[str]) -> str:
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
