"""Reader: a text that comes in pieces, for parsers written as generators; it makes each character part of an event.

A parser reads as if the whole text were there. Where the text is not there yet, the parser yields, and continues with the next
piece, so its result does not depend on how the text is cut. Characters that it takes are held until their kind is known:
`begin` makes them markup, and arguments follow; `give_back` makes them content, for they are not a call. Nothing taken is
looked at again, so time is linear.

White space alone beside calls is markup; a text keeps its own.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Markup, merged

T = TypeVar("T")
Waits = Generator[None, None, T]

MAX_NAME = 256  # characters of a function's name
_MAX_SPACES = 128  # characters read after a marker; if more than half are white space, an allowed text counts as following
SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text cannot be a call: the next character cannot continue one."""


class Markers:
    """Strings to find in a text."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._regex = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self._firsts = {text[0] for text in texts}
        self._longest = max(map(len, texts))

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the first marker begins, and the marker; it is None if one may begin there that is not complete."""
        if found := self._regex.search(text, at):
            return found.start(), found[0]
        if self._firsts.isdisjoint(text):
            return len(text), None
        for i in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[i] in self._firsts and any(marker.startswith(text[i:]) for marker in self.texts):
                return i, None
        return len(text), None


class Reader:
    """new_id: makes the id of a new call. is_forced: text that the output's end has cut off is markup, not content."""

    def __init__(self, new_id: Callable[[], str], is_forced: bool = False) -> None:
        self.text = ""
        self.at = 0  # [0, at) is taken   [at, end) is not read yet
        self.ended = False
        self.num_calls = 0
        self._new_id = new_id
        self._is_forced = is_forced
        self._events: list[Event] = []
        self._held: list[str] = []  # taken text of unknown kind
        self._blank: list[str] = []  # white space with no text before it since the last call
        self._in_text = False
        self._in_call = False  # from the beginning of a call to the end of its frame
        self._writes = False  # text that is taken belongs to arguments
        self._verbatim = False  # arguments are the output's text, unchanged
        self._sources: list[str] = []
        self._texts: list[str] = []

    # ------------------------------------------------------------------------------------------------------- the driver's
    def append(self, piece: str) -> None:
        self.text, self.at = (self.text[self.at :] + piece if self.at < len(self.text) else piece), 0

    def take_events(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return merged(events)

    # -------------------------------------------------------------------------------------------------------- the reader's
    def peek(self) -> Waits[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def take(self, count: int = 1) -> str:
        piece = self.text[self.at : self.at + count]
        self.at += count
        if not self._writes:
            self._held.append(piece)
            return piece
        self._sources.append(piece)
        if self._verbatim:
            self._texts.append(piece)
        return piece

    def take_as(self, text: str) -> None:
        """Take a character of verbatim arguments, and write this text for it. Elsewhere raises Malformed and takes nothing."""
        if not (self._writes and self._verbatim):
            raise Malformed
        self._sources.append(self.text[self.at])
        self._texts.append(text)
        self.at += 1

    def run(self, pattern: re.Pattern[str]) -> Waits[None]:
        """Take characters while they match; `pattern` has the form [...]*."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                self.take(match.end() - self.at)
            if self.at < len(self.text) or not (yield from self.peek()):
                return

    def skip_space(self) -> Waits[str]:
        """Take white space. Returns the next character, which is not taken."""
        char = yield from self.peek()
        while char and char in " \t\r\n":
            yield from self.run(SPACE)
            char = yield from self.peek()
        return char

    def expect(self, text: str) -> Waits[None]:
        """Take exactly this text. Raises Malformed for any other, and takes none of it: a call may begin there."""
        if (yield from self.looks_like(text)):
            self.take(len(text))
            return
        if self.ended and text.startswith(self.text[self.at :]):
            self.take(len(text))  # the output was cut off within it
        raise Malformed

    def look(self, pattern: re.Pattern[str], most: int) -> Waits[str]:
        """The next characters that match `pattern`, [...]*; none is taken. Raises Malformed for more than `most`."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            if len(match[0]) > most:
                raise Malformed
            if match.end() < len(self.text) or self.ended:
                return match[0]
            yield

    def looks_like(self, text: str) -> Waits[bool]:
        """Whether this text comes next; takes nothing."""
        while True:
            ahead = self.text[self.at : self.at + len(text)]
            if ahead == text:
                return True
            if not text.startswith(ahead) or self.ended:
                return False
            yield

    def is_followed(self, text: str, by: tuple[str, ...]) -> Waits[bool]:
        """Whether this text, which comes next, and white space are followed by one of `by` or the end; takes nothing."""
        while True:
            behind = self.text[self.at + len(text) : self.at + len(text) + _MAX_SPACES]
            rest = behind.lstrip(" \t\r\n")
            if rest.startswith(by) or len(behind) - len(rest) > _MAX_SPACES // 2:
                return True
            if not any(one.startswith(rest) for one in by) or self.ended:
                return not rest or any(one.startswith(rest) for one in by)
            yield

    def optional(self, text: str) -> Waits[bool]:
        """Take this text if it comes next; at the end, as much of it as there is."""
        while True:
            ahead = self.text[self.at : self.at + len(text)]
            if not text.startswith(ahead) or (self.ended and not ahead):
                return False
            if ahead == text or self.ended:
                self.take(len(ahead))
                return True
            yield

    def up_to(self, markers: Markers) -> Waits[str]:
        """Take the text before a marker, and return it. Raises Malformed if it is longer than MAX_NAME."""
        while True:
            at, found = markers.find(self.text, self.at)
            if at - self.at > MAX_NAME or (found is None and self.ended):
                raise Malformed
            if found is not None:
                return self.take(at - self.at)
            yield

    def pieces_up_to(self, markers: Markers, write: Callable[[str], None]) -> Waits[str]:
        """Take the text before a marker, of any length, and pass each piece to `write`. Returns the marker, which is not taken.

        If the output was cut off within what looks like a marker, that is not part of a piece. Raises Malformed without a
        marker.
        """
        while True:
            at, found = markers.find(self.text, self.at)
            if at > self.at:
                write(self.take(at - self.at))
            if found is not None:
                return found
            if self.ended:
                self.take(len(self.text) - at)
                raise Malformed
            yield

    def content_up_to(self, markers: Markers) -> Waits[str | None]:
        """Pass the text before the next marker on as content. Returns the marker, which is not taken; None at the end."""
        while True:
            at, found = markers.find(self.text, self.at)
            if found is None and self.ended and not self._is_forced:
                at = len(self.text)
            self._content(self.text[self.at : at])
            self.at = at
            if self.ended and found is None:
                self.take(len(self.text) - at)
                self.settle()
            if found is not None or self.ended:
                return found
            yield

    def rest_is_content(self) -> Waits[None]:
        while (yield from self.peek()):
            self._content(self.text[self.at :])
            self.at = len(self.text)

    # ----------------------------------------------------------------------------------------------------- what it becomes
    @property
    def held(self) -> int:
        """The present position in the held text, for `held_since`."""
        return len(self._held)

    def held_since(self, place: int) -> str:
        return "".join(self._held[place:])

    def head(self) -> None:
        """Held text, and text taken from now on, is the head of a call; it becomes content if the head is not completed."""
        self._in_call = False

    def begin(self, name: str, call_id: str | None = None, *, verbatim: bool = True, since: int | None = None) -> None:
        """Begin a call: held text was its head; text taken from now on is its arguments (verbatim), or their source.

        since: a position in the held text at which the arguments began.
        """
        early = self._held[since:] if since is not None else []
        del self._held[len(self._held) - len(early) :]
        self._events += [Markup("".join(self._blank))] if self._blank else []
        self._blank.clear()
        self.settle()
        self._events.append(CallBegun(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1
        self._in_call = self._writes = True
        self._in_text, self._verbatim = False, verbatim
        self._sources += early
        self._texts += early

    def write(self, text: str) -> None:
        """More of the arguments."""
        self._texts.append(text)

    def end_arguments(self) -> None:
        self._flush()
        self._writes = False

    def settle(self) -> None:
        """Make the held text markup: it ends a call, whatever comes next."""
        if self._held:
            self._events.append(Markup("".join(self._held)))
            self._held.clear()

    def close(self) -> None:
        """End the frame of a call, or of several."""
        self.settle()
        self._in_call = False

    def give_back(self) -> None:
        """Make the held text content: it is not a call. At the end of the text, it is the rest of a call that was begun."""
        self.end_arguments()
        if (self._in_call or self._is_forced) and self.ended and self.at >= len(self.text):
            self.settle()
        elif self._held:
            self._content("".join(self._held))
            self._held.clear()
        self._in_call = False

    def finish(self) -> None:
        """End the text and the parser."""
        self.give_back()
        if self._blank:
            blank = "".join(self._blank)
            self._events.append(Markup(blank) if self.num_calls else Content(blank))
            self._blank.clear()

    def _content(self, text: str) -> None:
        if not text:
            return
        if not self._in_text:
            if text.isspace():
                self._blank.append(text)
                return
            self._in_text = True
            if self._blank:
                text = "".join([*self._blank, text])
                self._blank.clear()
        self._events.append(Content(text))

    def _flush(self) -> None:
        if self._sources or self._texts:
            self._events.append(Arguments(self.num_calls - 1, "".join(self._texts), "".join(self._sources)))
            self._sources.clear()
            self._texts.clear()
