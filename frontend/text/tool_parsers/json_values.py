"""Parse JSON as it comes: values, and calls written as {"name": ..., "arguments": {...}}, alone or in a list.

JSON is checked strictly, character by character: the text taken is always the beginning of a valid value, and Malformed is
raised at the first character that cannot continue it. The one exception: bare line breaks and tabs in strings of arguments
become escapes. Values may be nested as deep as memory allows. Most formats use this.
"""

import json
import re
from dataclasses import dataclass

from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Reader, Waits

_STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*')
_BARE = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}  # models write them in strings of arguments; JSON needs escapes
_DIGITS = re.compile(r"[0-9]*")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}


def json_value(reader: Reader) -> Waits[None]:
    """Take one value, with the white space before it."""
    char = yield from reader.skip_space()
    if char not in _CLOSING:
        yield from _scalar(reader, char)
        return
    reader.take()
    yield from _rest_of(reader, _CLOSING[char])


def json_arguments(reader: Reader, name: str, call_id: str | None = None) -> Waits[None]:
    """Take an object as the arguments of a call of this name. The call begins when the character after the bracket is valid."""
    place = reader.held
    yield from reader.expect("{")
    if (yield from reader.skip_space()) not in ('"', "}"):
        raise Malformed
    reader.begin(name, call_id, since=place)
    yield from _rest_of(reader, "}")
    reader.end_arguments()


def _rest_of(reader: Reader, bracket: str) -> Waits[None]:
    """Take the rest of a list or an object that this bracket closes."""
    closing, is_first = [bracket], True  # is_first: right after an opening bracket
    while True:
        char = yield from reader.skip_space()
        if not (is_first and char == closing[-1]):
            if is_first and closing[-1] == "}":
                yield from _key(reader)
                char = yield from reader.skip_space()
            is_first = char in _CLOSING
            if is_first:
                reader.take()
                closing.append(_CLOSING[char])
                continue
            yield from _scalar(reader, char)
        is_first = False
        while closing:
            char = yield from reader.skip_space()
            if char == ",":
                reader.take()
                if closing[-1] == "}":
                    yield from reader.skip_space()
                    yield from _key(reader)
                break
            if char != closing[-1]:
                raise Malformed
            reader.take()
            closing.pop()
        else:
            return


def _key(reader: Reader) -> Waits[None]:
    yield from json_string(reader)
    yield from reader.skip_space()
    yield from reader.expect(":")


def _scalar(reader: Reader, char: str) -> Waits[None]:
    if char == '"':
        yield from json_string(reader)
    elif char in _LITERALS:
        yield from reader.expect(_LITERALS[char])
    else:
        yield from _number(reader, char)


def _number(reader: Reader, char: str) -> Waits[None]:
    if char == "-":
        reader.take()
        char = yield from reader.peek()
    if char == "0":
        reader.take()
    else:
        yield from _digits(reader)
    if (yield from reader.peek()) == ".":
        reader.take()
        yield from _digits(reader)
    if (char := (yield from reader.peek())) and char in "eE":
        reader.take()
        if (char := (yield from reader.peek())) and char in "+-":
            reader.take()
        yield from _digits(reader)


def _digits(reader: Reader) -> Waits[None]:
    char = yield from reader.peek()
    if not char or char not in "0123456789":
        raise Malformed
    yield from reader.run(_DIGITS)


def json_string(reader: Reader) -> Waits[None]:
    yield from reader.expect('"')
    while True:
        yield from reader.run(_STRING_BODY)
        char = yield from reader.peek()
        if char == '"':
            reader.take()
            return
        if char in _BARE:
            reader.take_as(_BARE[char])
            continue
        if char != "\\":
            raise Malformed
        reader.take()
        char = yield from reader.peek()
        if not char or char not in '"\\/bfnrtu':
            raise Malformed
        reader.take()
        if char == "u":
            for _ in range(4):
                char = yield from reader.peek()
                if not char or char not in "0123456789abcdefABCDEF":
                    raise Malformed
                reader.take()


@dataclass(frozen=True)
class CallShape:
    """How a format writes a call. name: the key of the function's name. others: further keys that it may have; None for any.
    needs_arguments: an object without arguments is not a call, in a format without other marks of a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    others: frozenset[str] | None = None
    needs_arguments: bool = False


ANY_CALL = CallShape()


def json_call(reader: Reader, shape: CallShape = ANY_CALL) -> Waits[None]:
    """Take one call. Its arguments are passed on as they come if its name comes before them."""
    yield from reader.skip_space()
    yield from reader.expect("{")
    reader.head()
    name, early, done = "", "", False  # early: arguments that came before the name
    while True:
        yield from reader.skip_space()
        key = yield from _short_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == shape.name and not name:
            name = yield from _short_string(reader)
            if not name:
                raise Malformed
        elif key in shape.arguments and not done and not early:
            if (yield from reader.peek()) == "n":  # for a function without parameters
                yield from reader.expect("null")
                early = "{}"
            elif name:
                yield from json_arguments(reader, name)
                done = True
            else:
                early = yield from _early_arguments(reader)
        elif shape.others is None or key in shape.others:
            yield from json_value(reader)
        else:
            raise Malformed
        char = yield from reader.skip_space()
        if char != ",":
            break
        reader.take()
    if char == "}":
        reader.take()
    elif not done:  # a missing bracket after the arguments is accepted
        raise Malformed
    if not done:
        if not name or (shape.needs_arguments and not early):
            raise Malformed
        reader.begin(name)
        reader.write(early or "{}")
        reader.end_arguments()
    reader.settle()


def _early_arguments(reader: Reader) -> Waits[str]:
    """Take an object and return it."""
    place = reader.held
    if (yield from reader.peek()) != "{":
        raise Malformed
    yield from json_value(reader)
    return reader.held_since(place)


def _short_string(reader: Reader) -> Waits[str]:
    """Take a string and return it; "" if it is too long for a name or has lone surrogates."""
    place = reader.held
    yield from json_string(reader)
    text = reader.held_since(place)
    value = json.loads(text) if len(text) <= 6 * MAX_NAME else ""
    return value if len(value) <= MAX_NAME and not any("\ud800" <= c <= "\udfff" for c in value) else ""


def json_calls(reader: Reader, shape: CallShape = ANY_CALL) -> Waits[None]:
    """Take a list of calls, or one call."""
    if (yield from reader.skip_space()) != "[":
        yield from json_call(reader, shape)
        return
    reader.take()
    while True:
        yield from json_call(reader, shape)
        if (yield from reader.skip_space()) != ",":
            break
        reader.take()
    yield from reader.expect("]")
