"""GLM-4.5 and 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, in 4.5 on lines of
their own.

Poolside's models write the same. Hunyuan's HYV3 writes `<tool_sep>` after the name, and `<tool_calls>` around all calls.
"""

import re
from typing import ClassVar

from quire.frontend.text.tool_parsers.reader import MAX_NAME, Malformed, Markers, Reader, Waits
from quire.frontend.text.tool_parsers.xml_values import XmlValues

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
CALLS, CALLS_END, SEPARATOR = "<tool_calls>", "</tool_calls>", "<tool_sep>"
_NAME = re.compile(r"[\w.-]*")
_KEY_ENDS, _VALUE_ENDS = Markers(KEY_END), Markers(VALUE_END)
_BEHIND_VALUES = (KEY, END)


class Glm45(XmlValues):
    starts = Markers(START)
    special: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from self._one(reader)
        reader.close()

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        reader.head()
        yield from reader.skip_space()
        name = yield from reader.look(_NAME, MAX_NAME)
        reader.take(len(name))
        yield from reader.skip_space()
        if (yield from reader.looks_like(SEPARATOR)):
            yield from reader.expect(SEPARATOR)
            yield from reader.skip_space()
        has_more = yield from reader.looks_like(KEY)
        if not name or not (has_more or (yield from reader.looks_like(END))):
            raise Malformed
        reader.begin(name, verbatim=False)
        reader.write("{")
        separator = ""
        while has_more:
            reader.write(separator)
            yield from self._pair(reader, name)
            separator = ", "
            yield from reader.skip_space()
            has_more = yield from reader.looks_like(KEY)
        yield from reader.expect(END)
        reader.write("}")
        reader.end_arguments()

    def _pair(self, reader: Reader, function: str) -> Waits[None]:
        yield from reader.expect(KEY)
        key = (yield from reader.up_to(_KEY_ENDS)).strip()
        yield from reader.expect(KEY_END)
        yield from reader.skip_space()
        yield from reader.expect(VALUE)
        yield from self._argument(reader, function, key, _VALUE_ENDS)
        yield from reader.expect(VALUE_END)

    def _ends_value(self, reader: Reader, found: str) -> Waits[bool]:
        return (yield from reader.is_followed(found, _BEHIND_VALUES))


class HyV3(Glm45):
    starts = Markers(CALLS, START)
    special = (*Glm45.special, CALLS, CALLS_END, SEPARATOR)

    def _call(self, reader: Reader) -> Waits[None]:
        if (yield from reader.looks_like(CALLS)):
            yield from reader.expect(CALLS)
            yield from reader.skip_space()
        yield from self._one(reader)
        while True:
            reader.settle()
            yield from reader.skip_space()
            if not (yield from reader.looks_like(START)):
                break
            yield from self._one(reader)
        if (yield from reader.optional(CALLS_END)):
            reader.close()
        else:
            reader.give_back()
