"""ReasoningParser: splits a reasoning model's output into reasoning, up to `</think>`, and content after that.

It is a pure state machine over pieces of text; the possible beginning of a tag is held back. The tags are markup, and so is
reasoning of white space alone. Content is passed on as it is, to a tool parser or the client.
"""

from enum import Enum
from typing import ClassVar

from quire.frontend.text.output_events import Content, Event, Markup, Reasoning, merged
from quire.frontend.text.tool_parsers.reader import Markers

START, END = "<think>", "</think>"
_ENDS = Markers(END)


class State(Enum):
    OPENING = "opening"  # a start tag may come
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningParser:
    """opened: whether the prompt ends within reasoning (True) or after it (False); None if it does not say.

    needs_start: without a start tag, there is no reasoning.
    """

    needs_start: ClassVar[bool]
    start, end = START, END

    def __init__(self, opened: bool | None = None) -> None:
        self.state = State.CONTENT if opened is False else State.OPENING
        self._needs_start = self.needs_start and opened is None
        self._blank: list[str] = []  # white space that may be followed by a tag
        self.never_reasoned = opened is False
        self._reasons = False  # whether there was more than white space
        self._partial = ""  # the possible beginning of a tag

    def feed(self, text: str) -> list[Event]:
        return self._read(text, False)

    def finish(self) -> list[Event]:
        """The remaining events, when the text has ended."""
        return self._read("", True)

    def _read(self, piece: str, ended: bool) -> list[Event]:
        text, self._partial = self._partial + piece, ""
        events: list[Event] = []
        if self.state is State.OPENING:
            text = self._opening(text, ended, events)
        if self.state is State.REASONING:
            text = self._reasoning(text, ended, events)
        if self.state is State.CONTENT and text:
            events.append(Content(text))
        elif text:
            self._partial = text
        return merged(events)

    def _opening(self, text: str, ended: bool, events: list[Event]) -> str:
        """Read up to a start tag or the first other text. Returns the rest of the text."""
        bare = text.lstrip()
        if len(bare) < len(text):
            self._blank.append(text[: len(text) - len(bare)])
        if START.startswith(bare) and bare != START and not ended:
            return bare
        if bare.startswith(START):
            events.append(Markup(self._take_blank() + START))
            self.state = State.REASONING
            return bare[len(START) :]
        self.state = State.CONTENT if self._needs_start else State.REASONING
        self.never_reasoned = self._needs_start
        return bare if self.state is State.REASONING else self._take_blank() + bare

    def _reasoning(self, text: str, ended: bool, events: list[Event]) -> str:
        at, found = _ENDS.find(text, 0)
        at = len(text) if ended and found is None else at
        self._reason(text[:at], events)
        if found is None:
            if ended and self._blank:
                events.append(Reasoning(self._take_blank()))
            return text[at:]
        events.append(Markup(self._take_blank() + END))
        self.state = State.CONTENT
        return text[at + len(END) :]

    def _reason(self, text: str, events: list[Event]) -> None:
        if not text or (text.isspace() and not self._reasons):
            self._blank += [text] if text else []
            return
        self._reasons = True
        events.append(Reasoning(self._take_blank() + text))

    def _take_blank(self) -> str:
        blank = "".join(self._blank)
        self._blank.clear()
        return blank
