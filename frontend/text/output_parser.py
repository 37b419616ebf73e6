"""OutputParser: the text of one output as events: reasoning first, then content and tool calls.

It chains a reasoning parser and a tool parser; either may be missing. A route makes one for each sequence and feeds it the
stream's text.
"""

from quire.frontend.text.output_events import Content, Event, merged
from quire.frontend.text.reasoning_parsers.base import ReasoningParser
from quire.frontend.text.tool_parsers.base import ToolParser

PIECE = 4096  # characters; parsing them takes well under 5 ms


class OutputParser:
    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

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
        return merged(events + (self._tools.finish() if self._tools is not None else []))

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
                result += self._tools.feed(event.text)
            else:
                result.append(event)
        return result
