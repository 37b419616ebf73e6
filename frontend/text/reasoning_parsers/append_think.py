"""MiniMax-M2's reasoning as a part of the content: `<think>`, with which the prompt ends, is put before the output.

Clients that keep the whole text in their history, as the model's makers advise, ask for this.
"""

from quire.frontend.text.output_events import Content, Event
from quire.frontend.text.reasoning_parsers.base import START, ReasoningParser


class AppendThink(ReasoningParser):
    needs_start = False

    def __init__(self, opened: bool | None = None) -> None:
        super().__init__(opened)
        self._is_begun = opened is False
        self.never_reasoned = True

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [] if self._is_begun else [Content(START, source="")]
        self._is_begun = True
        return [*events, Content(text)]

    def finish(self) -> list[Event]:
        return []
