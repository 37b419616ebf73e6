"""Llama 3.2 and 4, ToolACE, Olmo: the answer is a Python list of calls, `[f(a=1, b='x'), g()]`.

Such a list is a call only at the beginning of an answer, or after Llama 4's `<|python_start|>` (and before `<|python_end|>`).
Arguments are translated into JSON as they come. A call begins with its first value, so prose in brackets stays content.
"""

import re
from typing import ClassVar

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.python_values import begins_value, json_escaped, python_value
from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")


class Pythonic(ToolParser):
    """frame: the markers around a list."""

    frame: ClassVar[tuple[str, str]] = (START, END)
    starts = Markers(START)
    special = (START, END)

    def _opening(self, reader: Reader) -> Waits[None]:
        if (yield from reader.skip_space()) == "[":
            yield from self._try(reader, self._bare(reader))
        elif reader.held:
            reader.give_back()

    def _call(self, reader: Reader) -> Waits[None]:
        start, end = self.frame
        yield from reader.expect(start)
        yield from reader.skip_space()
        yield from self._list(reader)
        yield from reader.skip_space()
        if (yield from reader.optional(end)):
            reader.close()
        else:
            reader.give_back()

    def _bare(self, reader: Reader) -> Waits[None]:
        yield from self._list(reader)
        reader.close()

    def _list(self, reader: Reader) -> Waits[None]:
        yield from reader.expect("[")
        while True:
            yield from self._one(reader)
            if (yield from reader.skip_space()) != ",":
                break
            reader.take()
            if (yield from reader.skip_space()) == "]":  # after a trailing comma
                break
        yield from reader.expect("]")

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.skip_space()
        name = yield from self._name(reader)
        reader.head()
        yield from reader.expect("(")
        char = yield from reader.skip_space()
        key = ""
        if char != ")":
            key = yield from self._key(reader)
        reader.begin(name, verbatim=False)
        reader.write("{")
        while key:
            reader.write(f'"{json_escaped(key)}": ')
            yield from python_value(reader)
            key = ""
            if (yield from reader.skip_space()) == ",":
                reader.take()
                if (yield from reader.skip_space()) != ")":
                    key = yield from self._key(reader)
                    reader.write(", ")
        yield from reader.expect(")")
        reader.write("}")
        reader.end_arguments()

    def _key(self, reader: Reader) -> Waits[str]:
        """Take `key=`, up to the beginning of its value."""
        key = yield from self._name(reader)
        yield from reader.skip_space()
        yield from reader.expect("=")
        char = yield from reader.skip_space()
        if not char or not begins_value(char):
            raise Malformed
        return key

    def _name(self, reader: Reader) -> Waits[str]:
        name = yield from reader.look(_NAME, MAX_NAME)
        if not name or name[0].isdigit():
            raise Malformed
        return reader.take(len(name))
