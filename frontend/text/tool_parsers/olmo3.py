"""Olmo 3: Python calls, one a line, within `<function_calls>` tags: `f(a=1, b='x')`."""

from quire.frontend.text.tool_parsers.pythonic import Pythonic
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

START, END = "<function_calls>", "</function_calls>"


class Olmo3(Pythonic):
    starts = Markers(START)
    special = (START, END)

    def _opening(self, reader: Reader) -> Waits[None]:
        yield from ()

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        yield from self._one(reader)
        while (char := (yield from reader.skip_space())) and char != "<":
            yield from self._one(reader)
        yield from reader.expect(END)
        reader.close()
