"""Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`; Apriel writes the same.

The model's own template shows calls as `<tool_call>NAME` and arguments in a fenced block, which are read as well.
"""

from quire.frontend.text.tool_parsers.json_values import json_arguments
from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits
from quire.frontend.text.tool_parsers.tagged_json import TaggedJson

START, END = "<tool_calls>", "</tool_calls>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "\n```json\n", "\n```"
_NAME_ENDS = Markers("\n")


class Hunyuan(TaggedJson):
    begins, ends = (START,), (END,)
    starts = Markers(START)
    special = (START, END, CALL, CALL_END)

    def _calls(self, reader: Reader) -> Waits[None]:
        if (yield from reader.skip_space()) != "<":
            yield from super()._calls(reader)
            return
        while True:
            yield from self._fenced(reader)
            yield from reader.skip_space()
            if not (yield from reader.looks_like(CALL)):
                break

    def _fenced(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(CALL)
        reader.head()
        name = (yield from reader.up_to(_NAME_ENDS)).strip()
        yield from reader.expect(FENCE)
        if not name:
            raise Malformed
        yield from reader.skip_space()
        yield from json_arguments(reader, name)
        yield from reader.skip_space()
        yield from reader.expect("```")
        yield from reader.skip_space()
        yield from reader.expect(CALL_END)
        reader.settle()
