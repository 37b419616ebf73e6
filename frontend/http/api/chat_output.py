"""Parsed output as chat's messages and deltas, with content, reasoning and tool_calls.

A response has one `ChatOutput` if its plan parses anything; plain answers do not use it. The shapes are OpenAI's; reasoning has
vLLM's shape, under both names that clients look for.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.schemas import (
    ChatLogprobs,
    ChatMessage,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    ToolCall,
    Usage,
)
from quire.frontend.http.api.output_plan import Plan
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.sse import ChunkWriter, json_bytes
from quire.frontend.text.custom_calls import Parser
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Reasoning
from quire.frontend.text.output_parser import PIECE
from quire.ipc.messages.frontend import FinishReason


class ChatOutput:
    """include_reasoning: False leaves reasoning out of the answer."""

    def __init__(self, plan: Plan, include_reasoning: bool = True) -> None:
        self._plan = plan
        self._include_reasoning = include_reasoning
        self._reasoning = plan.new_reasoning_count()
        # by choice
        self._parsers: dict[int, Parser] = {}
        self._num_calls: dict[int, int] = {}
        self._customs: set[tuple[int, int]] = set()  # calls of custom tools: choice and index

    def _parser(self, index: int) -> Parser:
        if index not in self._parsers:
            self._parsers[index], self._num_calls[index] = self._plan.new_parser(), 0
        return self._parsers[index]

    # ------------------------------------------------------------------------------------------------------- streaming
    def chunks(
        self,
        run: PromptRun,
        delta: Delta,
        writer: ChunkWriter,
        logprobs: ChatLogprobs | None,
        token_ids: list[int] | None,
        usage: Usage | None,
    ) -> list[bytes]:
        """A chunk for each event of a delta; the first one has the delta's logprobs and token ids."""
        events = self.events(run, delta)
        index = run.first_choice + delta.index
        is_bare = logprobs is None and token_ids is None and usage is None
        if is_bare and len(events) == 1 and isinstance(event := events[0], Content):
            return [writer.text(index, event.text)]
        fields = [f for event in events if (f := self._fields(delta.index, event)) is not None]
        if not fields and (logprobs is not None or token_ids):
            fields = [{}]
        chunks = []
        for i, field in enumerate(fields):
            more: dict[str, Any] = {"logprobs": logprobs, "token_ids": token_ids} if i == 0 else {}
            chunks.append(writer.delta(index, json_bytes(field), usage=usage, **more))
        return chunks

    def events(self, run: PromptRun, delta: Delta) -> list[Event]:
        """All events of a delta, including those that the answer leaves out (`is_wanted`)."""
        parser = self._parser(delta.index)
        events = parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events = events + parser.finish()
        self._reasoning.add(run, delta, parser.never_reasoned)
        return events

    def _fields(self, index: int, event: Event) -> dict[str, Any] | None:
        """The fields of a chunk's delta; None for an event that the answer leaves out."""
        match event:
            case Content():
                return {"content": event.text}
            case Reasoning() if self._include_reasoning:
                return {"reasoning": event.text, "reasoning_content": event.text}
            case CallBegun() if self.is_wanted(event.index):
                self._num_calls[index] += 1
                call = {"name": event.name, "input" if event.kind == "custom" else "arguments": ""}
                if event.kind == "custom":
                    self._customs.add((index, event.index))
                return {"tool_calls": [{"index": event.index, "id": event.id, "type": event.kind, event.kind: call}]}
            case Arguments() if event.text and self.is_wanted(event.index):
                if (index, event.index) in self._customs:
                    return {"tool_calls": [{"index": event.index, "custom": {"input": event.text}}]}
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    def is_wanted(self, call: int) -> bool:
        """Whether the answer may contain the call of this index."""
        return self._plan.max_calls is None or call < self._plan.max_calls

    def finish_reason(self, index: int, reason: FinishReason) -> str:
        """ "tool_calls" for an output that contains calls and ended by itself, else the engine's reason."""
        return "tool_calls" if reason == "stop" and self._num_calls[index] else reason

    # ---------------------------------------------------------------------------------------------------- in one piece
    async def message(self, run: PromptRun, delta: Delta) -> ChatMessage:
        """The message of a choice, from its whole output."""
        events = await self.all_events(run, delta)
        calls = self._calls(events)
        self._num_calls[delta.index] = len(calls)
        reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
        if self._plan.has_reasoning and self._include_reasoning:
            reasoning = "".join([e.text for e in events if isinstance(e, Reasoning)]) or None
        content = "".join([e.text for e in events if isinstance(e, Content)]) or None
        return ChatMessage("assistant", content, tool_calls=calls, reasoning=reasoning, reasoning_content=reasoning)

    async def all_events(self, run: PromptRun, delta: Delta) -> list[Event]:
        """The events of a whole output. A long text is parsed in pieces, between which other requests have their turns."""
        parser, events = self._parser(delta.index), list[Event]()
        for start in range(0, len(delta.text), PIECE):
            if start or delta.index:
                await asyncio.sleep(0)
            events += parser.feed(delta.text[start : start + PIECE])
        events += parser.finish()
        self._reasoning.add(run, delta, parser.never_reasoned)
        return events

    def _calls(self, events: Sequence[Event]) -> list[ToolCall | CustomToolCall]:
        begun = [e for e in events if isinstance(e, CallBegun) and self.is_wanted(e.index)]
        pieces: list[list[str]] = [[] for _ in begun]
        for event in events:
            if isinstance(event, Arguments) and event.index < len(pieces):
                pieces[event.index].append(event.text)
        return [_call(event, "".join(pieces[event.index])) for event in begun]


def _call(begun: CallBegun, text: str) -> ToolCall | CustomToolCall:
    if begun.kind == "custom":
        return CustomToolCall(begun.id, CustomCall(begun.name, text))
    return ToolCall(begun.id, FunctionCall(begun.name, text))
