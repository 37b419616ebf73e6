"""OutputParser: the text of one output as events: reasoning first, then content and tool calls.

It chains a reasoning parser and a tool parser; either may be missing. A route makes one for each sequence and feeds it the
stream's text. Where the content stands in a frame, the tool parser may hold back text from before the frame's end tag; the tag
then joins the source of the event that it falls into, so that sources stay in order.
"""

import msgspec

from quire.frontend.text.output_events import Content, Event, Markup, merged, source_of
from quire.frontend.text.reasoning_parsers.base import ReasoningParser
from quire.frontend.text.tool_parsers.base import ToolParser

PIECE = 4096  # characters; parsing them takes well under 5 ms


class OutputParser:
    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._has_frame = reasoning is not None and reasoning.frame is not None
        self._num_fed = self._num_out = 0  # characters of content that the tool parser was given, and gave back
        self._tags: list[
            tuple[int, str]
        ] = []  # of the frame, each with the characters of content before it, not given back yet

    @property
    def never_reasoned(self) -> bool:
        """Whether the output has begun without reasoning."""
        return self._reasoning is None or self._reasoning.never_reasoned

    def feed(self, text: str) -> list[Event]:
        """The events of this piece of the output."""
        if self._reasoning is None:
            return self._without_reasoning(text)
        return self._through_tools(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        """The remaining events, when the output has ended."""
        events = self._through_tools(self._reasoning.finish()) if self._reasoning is not None else []
        return merged(events + (self._in_order(self._tools.finish()) if self._tools is not None else []))

    def _without_reasoning(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content) and event.source is None:
                self._num_fed += len(event.text)
                result += self._in_order(self._tools.feed(event.text))
            elif self._has_frame and isinstance(event, Markup) and self._num_out < self._num_fed:
                self._tags.append((self._num_fed, event.source))
            else:
                result.append(event)
        return result

    def _in_order(self, events: list[Event]) -> list[Event]:
        """The tool parser's events, with the frame's tags where they were."""
        if not self._has_frame:
            return events
        result: list[Event] = []
        for event in events:
            source = source_of(event)
            end = self._num_out + len(source)
            inside = [tag for tag in self._tags if tag[0] < end]
            for at, tag in reversed(inside):
                source = source[: at - self._num_out] + tag + source[at - self._num_out :]
            result.append(msgspec.structs.replace(event, source=source) if inside else event)
            del self._tags[: len(inside)]
            self._num_out = end
        while self._tags and self._tags[0][0] <= self._num_out:
            result.append(Markup(self._tags.pop(0)[1]))
        return result
