"""Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:5,...}<tool_call|>`, and FunctionGemma, which has other marks.

Texts stand between two marks and have no escapes. Keys stand bare, or between marks. All else is as in JSON. A bare word that
is no value of JSON counts as a text.
"""

import json
import re
from typing import ClassVar

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.python_values import json_escaped
from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:,{}\[\]]*")
_WORD = re.compile(r"[^,{}\[\]]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LONGEST_WORD = 4096  # characters; a bare word is held back until it has ended
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
_CLOSING = {"{": "}", "[": "]"}


class Gemma4(ToolParser):
    """begin, end: the marks of a call. quote: the mark on both sides of a text."""

    begin: ClassVar[str] = "<|tool_call>"
    end: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    starts = Markers(begin)
    special = (begin, end, quote)
    quotes: ClassVar[Markers] = Markers(quote)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(self.begin)
        reader.head()
        yield from reader.skip_space()
        yield from reader.expect("call:")
        name = yield from reader.look(_NAME, MAX_NAME)
        reader.take(len(name))
        if not name or (yield from reader.peek()) != "{":
            raise Malformed
        reader.begin(name, verbatim=False)
        yield from self._value(reader)
        reader.end_arguments()
        yield from reader.skip_space()
        yield from reader.expect(self.end)
        reader.close()

    def _value(self, reader: Reader) -> Waits[None]:
        """Take one value and write it as JSON. Values may be nested as deep as memory allows."""
        closing: list[str] = []
        while True:
            char = yield from reader.skip_space()
            if char in _CLOSING:
                reader.take()
                reader.write(char)
                closing.append(_CLOSING[char])
                if (yield from reader.skip_space()) != closing[-1]:
                    if char == "{":
                        yield from self._key(reader)
                    continue
            elif char and (yield from reader.looks_like(self.quote)):
                yield from self._text(reader)
            else:
                yield from self._word(reader)
            while closing:
                char = yield from reader.skip_space()
                if char == closing[-1]:
                    reader.take()
                    reader.write(closing.pop())
                    continue
                if char != ",":
                    raise Malformed
                reader.take()
                reader.write(", ")
                if closing[-1] == "}":
                    yield from self._key(reader)
                break
            else:
                return

    def _key(self, reader: Reader) -> Waits[None]:
        yield from reader.skip_space()
        if (yield from reader.looks_like(self.quote)):
            yield from self._text(reader)
            yield from reader.skip_space()
        else:
            key = yield from reader.look(_KEY, MAX_NAME)
            if not key.strip():
                raise Malformed
            reader.write(f'"{json_escaped(key.strip())}"')
            reader.take(len(key))
        yield from reader.expect(":")
        reader.write(": ")

    def _text(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(self.quote)
        reader.write('"')
        yield from reader.pieces_up_to(self.quotes, lambda piece: reader.write(json_escaped(piece)))
        yield from reader.expect(self.quote)
        reader.write('"')

    def _word(self, reader: Reader) -> Waits[None]:
        word = yield from reader.look(_WORD, _LONGEST_WORD)
        bare = word.strip()
        if not bare:
            raise Malformed
        reader.take(len(word))
        if _NUMBER.fullmatch(bare):
            reader.write(bare)
        else:
            reader.write(_WORDS.get(bare) or json.dumps(bare, ensure_ascii=False))


class FunctionGemma(Gemma4):
    begin: ClassVar[str] = "<start_function_call>"
    end: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    starts = Markers(begin)
    special = (begin, end, quote)
    quotes: ClassVar[Markers] = Markers(quote)
