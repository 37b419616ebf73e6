"""DeepSeek V3 and R1 (`function<sep>NAME`, arguments in a fenced block) and V3.1 (`NAME<sep>{...}`).

Each call is enclosed in a pair of tokens, and all calls together in another pair, which may be missing.
"""

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_arguments
from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME_ENDS, _LINE_ENDS = Markers(SEPARATOR), Markers("\n")


class DeepSeekV3(ToolParser):
    starts = Markers(CALLS, CALL)
    special = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    def _call(self, reader: Reader) -> Waits[None]:
        if (yield from reader.looks_like(CALLS)):
            yield from reader.expect(CALLS)
            yield from reader.skip_space()
        yield from self._one(reader)
        while True:
            yield from reader.skip_space()
            if not (yield from reader.looks_like(CALL)):
                break
            yield from self._one(reader)
        if (yield from reader.optional(CALLS_END)):
            reader.close()
        else:
            reader.give_back()

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(CALL)
        reader.head()
        name = yield from reader.up_to(_NAME_ENDS)
        yield from reader.expect(SEPARATOR)
        fenced = (yield from reader.skip_space()) != "{"
        if fenced:
            name = yield from reader.up_to(_LINE_ENDS)
            yield from reader.expect("\n```json\n")
            yield from reader.skip_space()
        if not name.strip():
            raise Malformed
        yield from json_arguments(reader, name.strip())
        yield from reader.skip_space()
        if fenced:
            yield from reader.expect("```")
            yield from reader.skip_space()
        yield from reader.expect(CALL_END)
        reader.settle()
