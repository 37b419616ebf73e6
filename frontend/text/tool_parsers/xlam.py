"""xLAM: the answer is a JSON list of calls, `[{"name": ..., "arguments": {...}}, ...]`.

The list may also stand in a fenced block, behind `[TOOL_CALLS]`, or in `<tool_call>` tags, with text before it. An object
without arguments, or with any other key than a call's, is content.
"""

from quire.frontend.text.tool_parsers.json_values import CallShape, json_calls
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits
from quire.frontend.text.tool_parsers.tagged_json import TaggedJson

FENCES, TOKEN, TAG = ("```json", "```"), "[TOOL_CALLS]", "<tool_call>"
FENCE_END, TAG_END = "```", "</tool_call>"


class Xlam(TaggedJson):
    begins, ends = (*FENCES, TOKEN, TAG), (FENCE_END, TAG_END)
    starts = Markers(*(fence + "\n[" for fence in FENCES), TOKEN, TAG)
    special = (TOKEN, TAG, TAG_END)
    shape = CallShape(arguments=("arguments",), others=frozenset({"id", "type"}), needs_arguments=True)

    def _opening(self, reader: Reader) -> Waits[None]:
        if (yield from reader.skip_space()) == "[" and not (yield from reader.looks_like(TOKEN)):
            yield from self._try(reader, self._bare(reader))
        elif reader.held:
            reader.give_back()

    def _bare(self, reader: Reader) -> Waits[None]:
        yield from json_calls(reader, self.shape)
        reader.close()
