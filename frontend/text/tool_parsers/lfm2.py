"""LFM2 and LFM2.5: a Python list of calls between markers, `<|tool_call_start|>[f(a=1, b='x'), g()]<|tool_call_end|>`.

There may be text before and after the list. Brackets without the markers are content.
"""

from quire.frontend.text.tool_parsers.pythonic import Pythonic
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(Pythonic):
    frame = (START, END)
    starts = Markers(START)
    special = frame

    def _opening(self, reader: Reader) -> Waits[None]:
        yield from ()
