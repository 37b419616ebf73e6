"""Calls of custom tools: a model writes `{"input": "..."}`, and the client gets the input's text, decoded piece by piece.

`CustomCalls` stands between a parser of the output and a route. Arguments of any other shape become the input as they are, so
nothing that the model wrote is lost.
"""

import re
from collections.abc import Set
from typing import Protocol

import msgspec

from quire.frontend.text.output_events import Arguments, CallBegun, Event

INPUT = "input"
_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_MAX_HEAD = 256  # characters before an input that may be white space


class Parser(Protocol):
    """OutputParser and what has its form."""

    @property
    def never_reasoned(self) -> bool: ...
    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class CustomCalls:
    """names: of the custom tools. Their calls begin as of kind "custom", and the text of their arguments is the input."""

    def __init__(self, parser: Parser, names: Set[str]) -> None:
        self._parser = parser
        self._names = names
        self._index = 0  # the open custom call's number
        self._input: CustomInput | None = None

    @property
    def never_reasoned(self) -> bool:
        return self._parser.never_reasoned

    def feed(self, text: str) -> list[Event]:
        return self._read(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._read(self._parser.finish()) + self._end()

    def _read(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, CallBegun):
                result += self._end()
                if event.name in self._names:
                    self._index, self._input = event.index, CustomInput()
                    event = msgspec.structs.replace(event, kind="custom")
            elif isinstance(event, Arguments) and self._input is not None:
                event = msgspec.structs.replace(event, text=self._input.feed(event.text))
            result.append(event)
        return result

    def _end(self) -> list[Event]:
        rest = self._input.finish() if self._input is not None else ""
        self._input = None
        return [Arguments(self._index, rest, "")] if rest else []


class CustomInput:
    """The text in `{"input": "..."}`, which comes in pieces. The head, and an escape that is cut, are held back."""

    def __init__(self) -> None:
        self._held = ""
        self._in_head = True
        self._in_text = False
        self._is_raw = False  # the arguments have another shape

    def feed(self, piece: str) -> str:
        """More of the arguments. Returns more of the input."""
        if self._is_raw:
            return piece
        text, self._held = self._held + piece, ""
        if self._in_head:
            head = _HEAD.match(text)
            if head is None:
                if not _may_be_head(text):
                    self._is_raw = True
                    return text
                self._held = text
                return ""
            text, self._in_head, self._in_text = text[head.end() :], False, True
        return self._decoded(text) if self._in_text else ""

    def finish(self) -> str:
        """The rest of the input, when the arguments have ended: a head that is cut off is no input, any other text is."""
        held, self._held = self._held, ""
        return held if self._in_head and not _may_be_head(held) else ""

    def _decoded(self, text: str) -> str:
        parts, at = [], 0
        while True:
            plain = _PLAIN.match(text, at)
            assert plain is not None
            parts.append(plain[0])
            at = plain.end()
            if at == len(text):
                break
            if text[at] == '"':
                self._in_text = False
                break
            char, length = _escape(text, at)
            if not length:
                self._held = text[at:]
                break
            parts.append(char)
            at += length
        return "".join(parts)


def _may_be_head(text: str) -> bool:
    """Whether a text is the beginning of `{"input": "`, with any white space."""
    bare = re.sub(r"\s", "", text)
    return len(text) <= _MAX_HEAD and f'{{"{INPUT}":"'.startswith(bare)


def _escape(text: str, at: int) -> tuple[str, int]:
    """The character of an escape and the escape's length; 0 if it is cut. A lone surrogate becomes U+FFFD."""
    if at + 1 >= len(text):
        return "", 0
    if text[at + 1] != "u":
        return _ESCAPES.get(text[at + 1], text[at + 1]), 2
    unit, digits = _unit(text, at)
    if unit is None:
        return ("", 0) if at + 2 + digits == len(text) else ("�", 2 + digits)
    if not 0xD800 <= unit < 0xDC00:
        return ("�" if 0xDC00 <= unit < 0xE000 else chr(unit)), 6
    if len(text) < at + 8 and "\\u".startswith(text[at + 6 :]):
        return "", 0
    if text[at + 6 : at + 8] != "\\u":
        return "�", 6
    low, digits = _unit(text, at + 6)
    if low is None and at + 8 + digits == len(text):
        return "", 0
    if low is None or not 0xDC00 <= low < 0xE000:
        return "�", 6
    return chr(0x10000 + (unit - 0xD800) * 0x400 + low - 0xDC00), 12


def _unit(text: str, at: int) -> tuple[int | None, int]:
    """The UTF-16 unit of an escape `\\uXXXX`, and how many of its four digits there are."""
    digits = re.match(r"[0-9A-Fa-f]{0,4}", text[at + 2 : at + 6])
    assert digits is not None
    return (int(digits[0], 16) if len(digits[0]) == 4 else None), len(digits[0])
