"""HarmonyParser: the output of gpt-oss as events. Its messages are reasoning, content, or calls, by channel and recipient.

The channel `analysis` is reasoning, `final` is content, and a message to a function is a call. `commentary` without a recipient
is what the model says to the user before its calls, so it is content; so is any channel that is not known, for no text is lost.
The text comes with marks in place of the markers (tokens.py), and is read as openai-harmony reads tokens: only an end marker
ends a message's content. Messages in other roles, which a model has no reason to write, are not shown.

It has the form of OutputParser. http/api/harmony_plan.py makes one for each sequence.
"""

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

from quire.frontend.text.harmony.header import read_header
from quire.frontend.text.harmony.tokens import ENDS, MARKS, MESSAGE, START, spelled
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Markup, Reasoning, merged
from quire.frontend.text.tool_parsers.base import new_call_id

_MARKS = re.compile(f"([{''.join(MARKS.values())}])")
_START, _MESSAGE = MARKS[START], MARKS[MESSAGE]
_MAX_HEADER = 4096  # characters; a longer text without a marker is an answer of a model that does not keep to the format
_BETWEEN = "\n"  # separates what messages of a kind say, in an answer that has one text of that kind


class State(Enum):
    HEADER = "header"
    CONTENT = "content"
    BETWEEN = "between"  # a message has ended


class HarmonyParser:
    """takes_calls: whether the client has tools; if not, a call is content. in_final: the prompt ends in an answer's text."""

    def __init__(self, takes_calls: bool = True, in_final: bool = False, new_id: Callable[[], str] = new_call_id) -> None:
        self._takes_calls = takes_calls
        self._new_id = new_id
        self._state = State.CONTENT if in_final else State.HEADER
        self._header: list[str] = []
        self._header_size = 0
        self._is_first = True  # the message that the prompt has begun
        self._kind: type[Content] | type[Reasoning] | type[Arguments] | type[Markup] = Content  # of the open message's text
        self._num_calls = 0
        self._call_is_empty = False
        self._said: dict[Any, bool] = {Content: False, Reasoning: False}  # whether there is text of this kind
        self._must_part: set[Any] = set()  # kinds; their next text comes from another message
        self._reasoned = self._decided = False

    @property
    def never_reasoned(self) -> bool:
        """Whether the output has begun without reasoning."""
        return self._decided and not self._reasoned

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in _MARKS.split(text):
            if piece:
                self._read(piece, events)
        return merged(events)

    def finish(self) -> list[Event]:
        """The remaining events, when the output has ended. A header that is cut off is markup, but for a text alone."""
        events: list[Event] = []
        if self._state is State.HEADER:
            text = "".join(self._header)
            if text.strip() and self._is_plain(text):
                self._open(Content)
                self._say(Content, text, events)
            else:
                self._markup(text, events)
            self._header.clear()
        elif self._state is State.CONTENT:
            self._end("", events)
        self._state = State.BETWEEN
        return merged(events)

    def _is_plain(self, text: str) -> bool:
        """Whether a header that is not complete is an answer without any markup."""
        words = text.split()
        return self._is_first and not _MARKS.search(text) and not words[0].startswith("to=") and words[0] != "assistant"

    # ------------------------------------------------------------------------------------------------------ piece by piece
    def _read(self, piece: str, events: list[Event]) -> None:
        match self._state:
            case State.CONTENT if piece in ENDS:
                self._end(piece, events)
            case State.CONTENT:
                self._add(piece, events)
            case State.HEADER if piece == _MESSAGE:
                self._begin(piece, events)
            case State.HEADER if piece in ENDS:
                self._end_in_header(piece, events)
            case State.HEADER:
                self._grow(piece, events)
            case State.BETWEEN:
                self._between(piece, events)

    def _between(self, piece: str, events: list[Event]) -> None:
        bare = piece.lstrip()
        self._markup(piece[: len(piece) - len(bare)], events)
        if bare in ENDS or not bare:
            return self._markup(bare, events)
        piece = bare
        self._state = State.HEADER
        if piece == _START:
            return self._markup(piece, events)
        self._is_first = True  # a header without its beginning
        if piece == _MESSAGE:
            return self._begin(piece, events)
        self._grow(piece, events)

    def _grow(self, piece: str, events: list[Event]) -> None:
        self._header.append(piece)
        self._header_size += len(piece)
        if self._header_size > _MAX_HEADER:
            text = self._take_header()
            self._open(Content)
            self._add(text, events)

    def _take_header(self) -> str:
        text = "".join(self._header)
        self._header.clear()
        self._header_size = 0
        return text

    def _begin(self, mark: str, events: list[Event]) -> None:
        """The header is complete."""
        text = self._take_header()
        header = read_header(text, self._is_first)
        self._markup(text + mark, events)
        function = header.function
        if function is not None and self._takes_calls:
            self._open(Arguments)
            events.append(CallBegun(self._num_calls, self._new_id(), function))
            self._num_calls += 1
            self._call_is_empty = True
        else:
            self._open(header.kind if function is None else Content)

    def _open(self, kind: Any) -> None:
        self._kind, self._state, self._is_first = kind, State.CONTENT, False
        self._decided = True
        self._reasoned |= kind is Reasoning
        if self._said.get(kind):
            self._must_part.add(kind)

    def _end_in_header(self, mark: str, events: list[Event]) -> None:
        """The message has ended without content. Words of the first one that are not its role and channel are its text."""
        text = self._take_header()
        header = read_header(text, self._is_first)
        kind, is_said = header._replace(recipient="").kind, self._is_first and bool(header.rest)
        self._open(kind)
        if is_said:
            self._say(kind, header.rest, events, text)
        else:
            self._markup(text, events)
        self._markup(mark, events)
        self._state = State.BETWEEN

    # --------------------------------------------------------------------------------------------------------- the content
    def _add(self, piece: str, events: list[Event]) -> None:
        text = spelled(piece)
        if self._kind is Arguments:
            self._call_is_empty = self._call_is_empty and text.isspace()
            events.append(Arguments(self._num_calls - 1, text, text))
        elif self._kind is Markup:
            events.append(Markup(text))
        else:
            self._say(self._kind, text, events)

    def _say(self, kind: Any, text: str, events: list[Event], source: str | None = None) -> None:
        if kind in self._must_part:
            self._must_part.discard(kind)
            events.append(kind(_BETWEEN, ""))
        self._said[kind] = True
        events.append(kind(spelled(text), None if source is None else spelled(source)))

    def _end(self, mark: str, events: list[Event]) -> None:
        if self._kind is Arguments and self._call_is_empty:
            events.append(Arguments(self._num_calls - 1, "{}", ""))
        self._markup(mark, events)
        self._state = State.BETWEEN

    def _markup(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Markup(spelled(text)))
