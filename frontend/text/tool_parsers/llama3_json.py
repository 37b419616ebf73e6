"""Llama 3 and 4: the answer is `{"name": ..., "parameters": {...}}`, or several of them, separated by `;` or white space.

They may come after `<|python_tag|>`. Without the tag, only an answer that begins with such an object is a call, and an object
with any other key than a call's is content.
"""

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import CallShape, json_call
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits

TAG = "<|python_tag|>"
_SHAPE = CallShape(others=frozenset({"type", "id"}), needs_arguments=True)


class Llama3Json(ToolParser):
    starts = Markers(TAG)
    special = (TAG,)

    def _opening(self, reader: Reader) -> Waits[None]:
        if (yield from reader.skip_space()) == "{":
            yield from self._try(reader, self._calls(reader))
        elif reader.held:
            reader.give_back()

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(TAG)
        yield from self._calls(reader)

    def _calls(self, reader: Reader) -> Waits[None]:
        yield from json_call(reader, _SHAPE)
        while (char := (yield from reader.skip_space())) in (";", "{"):
            if char == ";":
                reader.take()
            yield from json_call(reader, _SHAPE)
        reader.give_back()  # white space, which belongs to the text that follows, if any
