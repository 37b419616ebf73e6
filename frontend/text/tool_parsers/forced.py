"""Parse calls that a grammar guarantees: tool_choice "required" (a JSON list of calls) and a named function (its arguments).

http/api/tools/tool_grammar.py makes their schemas.
"""

import re

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_calls
from quire.frontend.text.tool_parsers.reader import Malformed, Reader, Waits

_ALL = re.compile(r"[\s\S]*")


class RequiredCalls(ToolParser):
    """The output is `[{"name": ..., "parameters": {...}}, ...]`."""

    def _run(self) -> Waits[None]:
        yield from self._try(self._reader, self._list(self._reader))
        yield from self._reader.rest_is_content()

    def _list(self, reader: Reader) -> Waits[None]:
        try:
            yield from json_calls(reader)
        except Malformed:
            if reader.ended and reader.at >= len(reader.text):  # cut off within the head of a call
                reader.settle()
            raise
        reader.close()


class NamedCall(ToolParser):
    """The output is the arguments of a call of this function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _run(self) -> Waits[None]:
        if (yield from self._reader.skip_space()):
            self._reader.begin(self._name)
            yield from self._reader.run(_ALL)
