"""Qwen3-Coder's XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Line breaks around a value do not belong to it. Some models omit the outer tags, or a value's end tag. So a value also ends at
the beginning of a parameter that the function has and the call does not have yet, and at the end of the call. The beginning
of any other parameter is part of the value. Seed-OSS has other outer tags.
"""

from collections.abc import Callable, Mapping
from itertools import islice

from quire.frontend.text.tool_parsers.base import Parameters
from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits
from quire.frontend.text.tool_parsers.xml_values import XmlValues, properties_of

START, END = "<tool_call>", "</tool_call>"
STARTS, ENDS = (START, "<seed:tool_call>"), (END, "</seed:tool_call>")
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME_ENDS = Markers(">")
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, *(f"\n{FUNCTION_END}\n{end}" for end in ENDS))
_BEHIND_VALUES = (PARAMETER, FUNCTION_END, *ENDS, *STARTS, FUNCTION)  # a value's end marker is followed by one of these
_MAX_ENDS = 256  # parameters of a function that may end another's value


class Qwen3Coder(XmlValues):
    starts = Markers(*STARTS, FUNCTION)
    special = (*STARTS, *ENDS)

    def __init__(
        self,
        tools: Mapping[str, Parameters] | None = None,
        new_id: Callable[[], str] | None = None,
        is_forced: bool = False,
    ) -> None:
        super().__init__(tools, new_id, is_forced)
        self._value_ends: dict[str, Markers] = {}
        self._begun: set[str] = set()  # the beginnings of the parameters that the call has so far

    def _call(self, reader: Reader) -> Waits[None]:
        for start in STARTS:
            if (yield from reader.optional(start)):
                yield from reader.skip_space()
                break
        yield from self._function(reader)
        yield from reader.skip_space()
        for end in ENDS:
            if (yield from reader.optional(end)):
                return reader.close()
        reader.give_back()

    def _function(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(FUNCTION)
        name = (yield from reader.up_to(_NAME_ENDS)).strip()
        yield from reader.expect(">")
        yield from reader.skip_space()
        has_more = yield from reader.looks_like(PARAMETER)
        if not name or not (has_more or (yield from reader.looks_like(FUNCTION_END))):
            raise Malformed
        reader.begin(name, verbatim=False)
        reader.write("{")
        self._begun.clear()
        first = True
        while has_more:
            yield from self._parameter(reader, name, "" if first else ", ")
            first = False
            yield from reader.skip_space()
            has_more = yield from reader.looks_like(PARAMETER)
        for next_one in (*ENDS, *STARTS, FUNCTION):
            if (yield from reader.looks_like(next_one)):
                break
        else:
            yield from reader.expect(FUNCTION_END)
        reader.write("}")
        reader.end_arguments()

    def _parameter(self, reader: Reader, function: str, separator: str) -> Waits[None]:
        yield from reader.expect(PARAMETER)
        key = (yield from reader.up_to(_NAME_ENDS)).strip()
        yield from reader.expect(">")
        if (yield from reader.peek()) == "\n":
            reader.take()
        self._begun.add(_beginning(key))
        reader.write(separator)
        yield from self._argument(reader, function, key, self._ends(function))
        yield from reader.skip_space()  # the line break
        if not (yield from reader.looks_like(PARAMETER)) and not (yield from reader.looks_like(FUNCTION_END)):
            yield from reader.expect(PARAMETER_END)

    def _ends(self, function: str) -> Markers:
        """The markers that may end a value of the function's parameters."""
        if function not in self._value_ends:
            names = islice(properties_of(self._tools.get(function, {})), _MAX_ENDS)
            self._value_ends[function] = Markers(*_VALUE_ENDS, *(_beginning(name) for name in names if ">" not in name))
        return self._value_ends[function]

    def _ends_value(self, reader: Reader, found: str) -> Waits[bool]:
        if found in self._begun:
            return False
        return not found.endswith(PARAMETER_END) or (yield from reader.is_followed(found, _BEHIND_VALUES))


def _beginning(key: str) -> str:
    """The beginning of a parameter, after another one's value."""
    return f"\n{PARAMETER}{key}>"
