"""Apertus: `<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`, a list of objects that each name one function."""

import json

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import json_arguments, json_string
from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits

START, END = "<|tools_prefix|>", "<|tools_suffix|>"


class Apertus(ToolParser):
    starts = Markers(START)
    special = (START, END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        yield from reader.skip_space()
        yield from reader.expect("[")
        while True:
            yield from self._one(reader)
            if (yield from reader.skip_space()) != ",":
                break
            reader.take()
        yield from reader.expect("]")
        reader.settle()
        yield from reader.skip_space()
        if (yield from reader.optional(END)):
            reader.close()
        else:
            reader.give_back()

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.skip_space()
        yield from reader.expect("{")
        reader.head()
        yield from reader.skip_space()
        place = reader.held
        yield from json_string(reader)
        name = reader.held_since(place)
        if not 2 < len(name) <= MAX_NAME or "\\" in name:
            raise Malformed
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from json_arguments(reader, json.loads(name))
        yield from reader.skip_space()
        yield from reader.expect("}")
        reader.settle()
