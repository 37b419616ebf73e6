"""Granite 3: `<|tool_call|>` (3.1: `<tool_call>`) and a list of calls, `[{"name": ..., "arguments": {...}}, ...]`.

Granite 4 uses Hermes' format, which is accepted as well.
"""

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_calls
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

TOKEN, START, END = "<|tool_call|>", "<tool_call>", "</tool_call>"


class Granite(ToolParser):
    starts = Markers(TOKEN, START)
    special = (TOKEN, START, END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect("<")
        yield from reader.expect("|tool_call|>" if (yield from reader.peek()) == "|" else "tool_call>")
        yield from json_calls(reader)
        reader.settle()
        yield from reader.skip_space()
        if (yield from reader.optional(END)):
            reader.close()
        else:
            reader.give_back()
