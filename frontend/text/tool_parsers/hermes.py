"""Hermes, Qwen2.5, Qwen3 and the bundled model: any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

There may be text before, between and after the calls.
"""

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_call
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

START, END = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    starts = Markers(START)
    special = (START, END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        yield from json_call(reader)
        yield from reader.skip_space()
        yield from reader.expect(END)
        reader.close()
