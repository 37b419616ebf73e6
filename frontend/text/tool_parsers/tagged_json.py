"""TaggedJson: the base of formats that write calls as JSON, one call or a list, behind a marker.

The formats here differ in their markers alone. Those with a syntax of their own have files of their own.
"""

from typing import ClassVar

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.json_values import ANY_CALL, CallShape, json_calls
from quire.frontend.text.tool_parsers.reader import Markers, Reader, Waits


class TaggedJson(ToolParser):
    """begins, ends: the markers. One of begins must come, and one of ends may. `starts` may have more of what must follow."""

    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]] = ()
    shape: ClassVar[CallShape] = ANY_CALL

    def _call(self, reader: Reader) -> Waits[None]:
        for begin in sorted(self.begins, key=len, reverse=True):
            if (yield from reader.looks_like(begin)):
                yield from reader.expect(begin)
                break
        yield from self._calls(reader)
        reader.settle()
        yield from reader.skip_space()
        for end in self.ends:
            if (yield from reader.optional(end)):
                return reader.close()
        reader.give_back()

    def _calls(self, reader: Reader) -> Waits[None]:
        yield from json_calls(reader, self.shape)


class Granite(TaggedJson):
    """Granite 3: `<|tool_call|>` (3.1: `<tool_call>`) and a list of calls. Granite 4 writes as Hermes."""

    TOKEN, START, END = "<|tool_call|>", "<tool_call>", "</tool_call>"
    begins, ends = (TOKEN, START), (END,)
    starts = Markers(*begins)
    special = (*begins, *ends)


class Granite20bFC(TaggedJson):
    """Granite 20B for function calls: `<function_call> {...}`, once for each call."""

    START = "<function_call>"
    begins = (START,)
    starts = Markers(START)
    special = (START,)


class Nemotron(TaggedJson):
    """Nemotron Nano 2: `<TOOLCALL>[...]</TOOLCALL>`. Nemotron 3 writes as Qwen3-Coder."""

    START, END = "<TOOLCALL>", "</TOOLCALL>"
    begins, ends = (START,), (END,)
    starts = Markers(START)
    special = (START, END)


class Phi4Mini(TaggedJson):
    """Phi-4-mini: `functools[...]`, or its tokens `<|tool_call|>[...]<|/tool_call|>`."""

    WORD, START, END = "functools", "<|tool_call|>", "<|/tool_call|>"
    begins, ends = (WORD, START), (END,)
    starts = Markers(WORD + "[", START)
    special = (START, END)


class GigaChat3(TaggedJson):
    """GigaChat 3: a message to the role `function call`, or `<|function_call|>`; `<|message_sep|>` ends a text."""

    ROLE, TOKEN, SEPARATOR = "function call<|role_sep|>\n", "<|function_call|>", "<|message_sep|>\n\n"
    begins = (SEPARATOR + ROLE, ROLE, TOKEN)
    starts = Markers(*begins)
    special = (TOKEN, "<|message_sep|>", "<|role_sep|>")


class CohereCommand(TaggedJson):
    """Command A and R7B: `<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`."""

    START, END = "<|START_ACTION|>", "<|END_ACTION|>"
    begins, ends = (START,), (END,)
    starts = Markers(START)
    special = (START, END)
    shape = CallShape("tool_name", ("parameters",), frozenset({"tool_call_id"}))


class Longcat(TaggedJson):
    """LongCat: Hermes' format in tags of its own."""

    START, END = "<longcat_tool_call>", "</longcat_tool_call>"
    begins, ends = (START,), (END,)
    starts = Markers(START)
    special = (START, END)
