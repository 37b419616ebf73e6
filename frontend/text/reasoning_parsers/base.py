"""ReasoningParser: splits a reasoning model's output into reasoning, up to an end tag such as `</think>`, and content.

It is a pure state machine over pieces of text; the possible beginning of a tag is held back. The tags are markup, and so is
reasoning of white space alone. Content is passed on as it is, to a tool parser or the client. A format is a subclass.
"""

from enum import Enum
from typing import ClassVar

from quire.frontend.text.output_events import Content, Event, Markup, Reasoning, merged
from quire.frontend.text.tool_parsers.reader import Markers

START, END = "<think>", "</think>"


class State(Enum):
    OPENING = "opening"  # a start tag may come
    LABEL = "label"  # a label may come
    REASONING = "reasoning"
    FRAME = "frame"  # the start tag of a frame may come
    FRAMED = "framed"  # content within a frame
    CONTENT = "content"


class ReasoningParser:
    """opened: whether the prompt ends within reasoning (True) or after it (False); None if it does not say.

    needs_start: without a start tag, there is no reasoning. starts, ends: the tags, the usual one first. label: a text that the
    model writes behind a start tag. frame: tags that stand around the content, which are markup. breaks: markers that end
    reasoning without an end tag, and belong to the content.
    """

    needs_start: ClassVar[bool]
    starts: ClassVar[tuple[str, ...]] = (START,)
    ends: ClassVar[tuple[str, ...]] = (END,)
    label: ClassVar[str] = ""
    frame: ClassVar[tuple[str, str] | None] = None
    breaks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, opened: bool | None = None) -> None:
        self.state = State.FRAME if opened is False else State.OPENING
        self._needs_start = self.needs_start and opened is None
        self._blank: list[str] = []  # white space that may be followed by a tag
        self.never_reasoned = opened is False
        self._reasons = False  # whether there was more than white space
        self._partial = ""  # the possible beginning of a tag
        self._ends = Markers(*self.ends, *self.breaks)
        self._frame_ends = Markers("\n" + self.frame[1], self.frame[1]) if self.frame is not None else None
        self._steps = {
            State.OPENING: self._opening,
            State.LABEL: self._label,
            State.REASONING: self._reasoning,
            State.FRAME: self._frame,
            State.FRAMED: self._framed,
            State.CONTENT: self._content,
        }

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Texts that may be special tokens; these have to be kept in the text."""
        return (*cls.starts, *cls.ends, *(cls.frame or ()), *cls.breaks)

    def feed(self, text: str) -> list[Event]:
        return self._read(text, False)

    def finish(self) -> list[Event]:
        """The remaining events, when the text has ended."""
        return self._read("", True)

    def _read(self, piece: str, ended: bool) -> list[Event]:
        """Each state's step takes what it can, and returns the rest, which the next one gets if it has changed the state."""
        text, self._partial = self._partial + piece, ""
        events: list[Event] = []
        while True:
            state = self.state
            text = self._steps[state](text, ended, events)
            if self.state is state:
                break
        self._partial = text
        return merged(events)

    def _opening(self, text: str, ended: bool, events: list[Event]) -> str:
        """Read up to a start tag or the first other text."""
        bare = text.lstrip()
        if len(bare) < len(text):
            self._blank.append(text[: len(text) - len(bare)])
        start = next((start for start in self.starts if bare.startswith(start)), None)
        if start is None and not ended and any(start.startswith(bare) for start in self.starts):
            return bare
        if start is not None:
            events.append(Markup(self._take_blank() + start))
            self.state = State.LABEL
            return bare[len(start) :]
        self.state = State.FRAME if self._needs_start else State.REASONING
        self.never_reasoned = self._needs_start
        return bare if self.state is State.REASONING else self._take_blank() + bare

    def _label(self, text: str, ended: bool, events: list[Event]) -> str:
        if len(text) < len(self.label) and self.label.startswith(text) and not ended:
            return text
        self.state = State.REASONING
        if not self.label or not text.startswith(self.label):
            return text
        events.append(Markup(self.label))
        return text[len(self.label) :]

    def _reasoning(self, text: str, ended: bool, events: list[Event]) -> str:
        at, found = self._ends.find(text, 0)
        at = len(text) if ended and found is None else at
        self._reason(text[:at], events)
        if found is None:
            if ended and self._blank:
                events.append(Reasoning(self._take_blank()))
            return text[at:]
        tag = found if found in self.ends else ""
        events += [Markup(self._take_blank() + tag)] if tag or self._blank else []
        self.state = State.FRAME
        return text[at + len(tag) :]

    def _frame(self, text: str, ended: bool, events: list[Event]) -> str:
        """Read the start tag of a frame, and the line break behind it."""
        bare = text.lstrip()
        tag = self.frame[0] if self.frame is not None else ""
        if tag and len(bare) <= len(tag) and tag.startswith(bare) and not ended:
            return text
        if not tag or not bare.startswith(tag):
            self.state = State.CONTENT
            return text
        rest = bare[len(tag) :].removeprefix("\n")
        events.append(Markup(text[: len(text) - len(rest)]))
        self.state = State.FRAMED
        return rest

    def _framed(self, text: str, ended: bool, events: list[Event]) -> str:
        assert self._frame_ends is not None
        at, found = self._frame_ends.find(text, 0)
        at = len(text) if ended and found is None else at
        events += [Content(text[:at])] if at else []
        if found is None:
            return text[at:]
        events.append(Markup(found))
        self.state = State.CONTENT
        return text[at + len(found) :]

    def _content(self, text: str, ended: bool, events: list[Event]) -> str:
        events += [Content(text)] if text else []
        return ""

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
