"""MiniMax-M2: calls in one frame, each `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`."""

from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits
from quire.frontend.text.tool_parsers.xml_values import XmlValues

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = "<invoke name=", "</invoke>"
PARAMETER, PARAMETER_END = "<parameter name=", "</parameter>"
_NAME_ENDS, _VALUE_ENDS = Markers(">"), Markers(PARAMETER_END)
_BEHIND_VALUES = (PARAMETER, INVOKE_END)


class MiniMaxM2(XmlValues):
    starts = Markers(START)
    special = (START, END)

    def _call(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(START)
        yield from reader.skip_space()
        yield from self._one(reader)
        while True:
            yield from reader.skip_space()
            if not (yield from reader.looks_like(INVOKE)):
                break
            yield from self._one(reader)
        if (yield from reader.optional(END)):
            reader.close()
        else:
            reader.give_back()

    def _one(self, reader: Reader) -> Waits[None]:
        yield from reader.expect(INVOKE)
        reader.head()
        name = yield from self._name(reader)
        yield from reader.skip_space()
        has_more = yield from reader.looks_like(PARAMETER)
        if not has_more and not (yield from reader.looks_like(INVOKE_END)):
            raise Malformed
        reader.begin(name, verbatim=False)
        reader.write("{")
        separator = ""
        while has_more:
            reader.write(separator)
            yield from reader.expect(PARAMETER)
            key = yield from self._name(reader)
            yield from self._argument(reader, name, key, _VALUE_ENDS)
            yield from reader.expect(PARAMETER_END)
            separator = ", "
            yield from reader.skip_space()
            has_more = yield from reader.looks_like(PARAMETER)
        yield from reader.expect(INVOKE_END)
        reader.write("}")
        reader.end_arguments()
        reader.settle()

    def _name(self, reader: Reader) -> Waits[str]:
        """Take a name in quotes, and the bracket behind it."""
        text = (yield from reader.up_to(_NAME_ENDS)).strip()
        name = text[1:-1] if text[:1] in ("'", '"') and text[-1:] == text[:1] else text
        yield from reader.expect(">")
        if not name.strip():
            raise Malformed
        return name

    def _ends_value(self, reader: Reader, found: str) -> Waits[bool]:
        return (yield from reader.is_followed(found, _BEHIND_VALUES))
