"""Translate Python literals into JSON as they come: the values in `f(a='x', b=[1, None])`.

These are numbers, strings with Python's escapes (also triple-quoted, or several in a row), True, False, None (and JSON's
names), lists, tuples, and dicts with strings as keys. The text taken is always the beginning of a valid value; Malformed is
raised at the first character or word that cannot continue it. A value in parentheses, `(1)`, counts as a tuple of one.
"""

import json
import math
import re

from quire.frontend.text.output_events import Arguments
from quire.frontend.text.tool_parsers.reader import Malformed, Reader, Waits

_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?([0-9]+(_[0-9]+)*)?\.?([0-9]+(_[0-9]+)*)?([eE][+-]?[0-9]+)?")
_MAX_WORD = 4096  # characters; a number is held back until it has ended
_NAMES = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_BODY = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_BEGINS_VALUE = frozenset("{[('\"-+.0123456789TFNtfn")


def begins_value(char: str) -> bool:
    return char in _BEGINS_VALUE


def python_value(reader: Reader) -> Waits[None]:
    """Take one value, with the white space before it, and write it as JSON."""
    closing: list[str] = []
    while True:
        char = yield from reader.skip_space()
        if char in _CLOSING:
            reader.take()
            reader.write("{" if char == "{" else "[")
            closing.append(_CLOSING[char])
            if (yield from reader.skip_space()) != closing[-1]:
                if char == "{":
                    yield from _key(reader)
                continue
        elif char in _BODY:
            yield from _string(reader)
        else:
            yield from _word(reader)
        while closing:
            char = yield from reader.skip_space()
            more = char == ","
            if more:
                reader.take()
                char = yield from reader.skip_space()
            if char == closing[-1]:  # also after a trailing comma
                reader.take()
                reader.write("}" if closing.pop() == "}" else "]")
                continue
            if not more or not char:
                raise Malformed
            reader.write(", ")
            if closing[-1] == "}":
                yield from _key(reader)
            break
        else:
            return


def literal_as_json(text: str) -> str | None:
    """A text that is one such literal, as JSON; None if it is not one."""
    reader = Reader(str)
    reader.append(text)
    reader.ended = True
    reader.begin("", verbatim=False)
    try:
        for _ in python_value(reader):
            pass  # it never waits, because the text is complete
    except Malformed:
        return None
    if reader.text[reader.at :].strip():
        return None
    return "".join(event.text for event in reader.take_events() if isinstance(event, Arguments))


def _key(reader: Reader) -> Waits[None]:
    char = yield from reader.peek()
    if char not in _BODY:
        raise Malformed
    yield from _string(reader)
    yield from reader.skip_space()
    yield from reader.expect(":")
    reader.write(": ")


def _word(reader: Reader) -> Waits[None]:
    word = yield from reader.look(_WORD, _MAX_WORD)
    value = _NAMES.get(word) or _number(word)
    reader.take(len(word))
    reader.write(value)


def _number(word: str) -> str:
    if _JSON_NUMBER.fullmatch(word):
        return word
    if not any(c.isdigit() for c in word) or not _PYTHON_NUMBER.fullmatch(word):
        raise Malformed
    try:
        value = float(word) if set(word) & set(".eE") else int(word)
    except ValueError:
        raise Malformed from None
    if not math.isfinite(value):
        raise Malformed
    return json.dumps(value)


def _string(reader: Reader) -> Waits[None]:
    """Take strings in a row, which are one string, as in Python."""
    reader.write('"')
    char = yield from reader.peek()
    while char in _BODY:
        yield from _quoted(reader, char)
        char = yield from reader.skip_space()
    reader.write('"')


def _quoted(reader: Reader, quote: str) -> Waits[None]:
    """Take a string in single or triple quotes of this kind."""
    reader.take()
    end = quote
    if (yield from reader.looks_like(quote * 2)):
        reader.take(2)
        end = quote * 3
    while True:
        char = yield from reader.peek()
        while char and char != quote and char != "\\":
            match = _BODY[quote].match(reader.text, reader.at)
            assert match is not None
            reader.write(json_escaped(reader.take(match.end() - reader.at)))
            char = yield from reader.peek()
        if not char:
            raise Malformed
        if char == "\\":
            yield from _escape(reader)
        elif (yield from reader.looks_like(end)):
            reader.take(len(end))
            return
        else:
            reader.write(json_escaped(reader.take()))


def _escape(reader: Reader) -> Waits[None]:
    reader.take()
    char = yield from reader.peek()
    if not char:
        raise Malformed
    if char in _HEX_DIGITS:
        reader.take()
        reader.write(json_escaped(chr((yield from _hex(reader, _HEX_DIGITS[char])))))
    elif char in "01234567":
        reader.write(json_escaped(chr((yield from _octal(reader)))))
    elif char in _ESCAPES:
        reader.take()
        reader.write(json_escaped(_ESCAPES[char]))
    else:  # not an escape, as in Python
        reader.write(json_escaped("\\"))


def _hex(reader: Reader, count: int) -> Waits[int]:
    value = 0
    for _ in range(count):
        char = yield from reader.peek()
        if not char or char not in "0123456789abcdefABCDEF":
            raise Malformed
        value = value * 16 + int(char, 16)
        if value > 0x10FFFF:
            raise Malformed
        reader.take()
    return value


def _octal(reader: Reader) -> Waits[int]:
    value = 0
    for _ in range(3):
        char = yield from reader.peek()
        if not char or char not in "01234567":
            break
        value = value * 8 + int(char)
        reader.take()
    return value


def json_escaped(text: str) -> str:
    """The text as it is within a JSON string. Lone surrogates, which UTF-8 cannot encode, become escapes."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    try:
        escaped.encode()
    except UnicodeEncodeError:
        return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in escaped)
    return escaped
