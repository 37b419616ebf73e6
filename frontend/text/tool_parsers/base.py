"""ToolParser: the base of all formats of tool calls; it turns a text that comes in pieces into events.

A format is a subclass with its markers and a generator over a Reader, `_call`, which takes one call, or several in one frame,
from its first marker on. It raises Malformed if the text is not a call. A parser belongs to one output.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from quire.frontend.text.output_events import Event
from quire.frontend.text.tool_parsers.reader import Malformed, Markers, Reader, Waits

Parameters = Mapping[str, Any]  # JSON Schema of a function's parameters


def new_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


class ToolParser:
    """tools: name -> JSON Schema of its parameters, for formats in which values have no type. is_forced: the output must be
    calls, so the beginning of a call that was cut off is no content.

    starts: markers with which a call begins, anywhere in a text. special: markers that may be special tokens; these have to be
    kept in the text.
    """

    starts: ClassVar[Markers]
    special: ClassVar[tuple[str, ...]] = ()
    new_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(
        self,
        tools: Mapping[str, Parameters] | None = None,
        new_id: Callable[[], str] | None = None,
        is_forced: bool = False,
    ) -> None:
        self._tools = tools or {}
        self._reader = Reader(new_id or self.new_id, is_forced)
        self._running = self._run()
        self._started = self._done = False

    def feed(self, text: str) -> list[Event]:
        """The events of this piece; text that is still ambiguous is held back."""
        self._reader.append(text)
        self._go_on()
        return self._reader.take_events()

    def finish(self) -> list[Event]:
        """The remaining events, when the text has ended."""
        self._reader.ended = True
        self._go_on()
        self._reader.finish()
        return self._reader.take_events()

    def _go_on(self) -> None:
        if not self._done:
            self._done = next(self._running, self) is self

    def _run(self) -> Waits[None]:
        reader = self._reader
        yield from self._opening(reader)
        while (yield from reader.content_up_to(self.starts)):
            yield from self._try(reader, self._call(reader))

    def _opening(self, reader: Reader) -> Waits[None]:
        """Read the beginning of the text, for formats in which it may be a call."""
        yield from ()

    def _try(self, reader: Reader, call: Waits[None]) -> Waits[None]:
        try:
            yield from call
        except Malformed:
            reader.give_back()

    def _call(self, reader: Reader) -> Waits[None]:
        """Take one call, from its first marker on."""
        raise NotImplementedError
