"""Kimi K2: calls of one section, each
`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

`functions.NAME:INDEX` is the call's id, which the model's template needs to see again.
"""

import re

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_arguments
from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OTHER_SECTION, OTHER_SECTION_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"  # as it is sometimes written
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
NAMESPACE = "functions."
_ID = re.compile(r"[\w.:\- \n]*")


class KimiK2(ToolParser):
    starts = Markers(SECTION, OTHER_SECTION)
    special = (SECTION, SECTION_END, OTHER_SECTION, OTHER_SECTION_END, CALL, ARGUMENTS, CALL_END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(SECTION if (yield from reader.looks_like(SECTION)) else OTHER_SECTION)
        yield from reader.skip_space()
        yield from self._one(reader)
        while True:
            yield from reader.skip_space()
            if not (yield from reader.looks_like(CALL)):
                break
            yield from self._one(reader)
        for end in (SECTION_END, OTHER_SECTION_END):
            if (yield from reader.optional(end)):
                return reader.close()
        reader.give_back()

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(CALL)
        reader.head()
        text = yield from reader.look(_ID, MAX_NAME)
        reader.take(len(text))
        call_id = text.strip()
        name = call_id.rpartition(":")[0].removeprefix(NAMESPACE)
        if not name:
            raise Malformed
        yield from reader.expect(ARGUMENTS)
        yield from reader.skip_space()
        yield from json_arguments(reader, name, call_id)
        yield from reader.skip_space()
        yield from reader.expect(CALL_END)
        reader.settle()
