"""Answer: one request's output as an Anthropic message, in one piece or as the events of a stream.

create.py makes one when it has submitted the request. It owns the output's content blocks, stop reason and usage; stream.py
sends the events that it makes.
"""

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.client.turns import Slice, in_thread
from quire.frontend.http.api.messages.blocks import Blocks, Step, content_of
from quire.frontend.http.api.messages.schemas import (
    ContentBlock,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    OutputTokensDetails,
)
from quire.frontend.http.api.messages.stream import EventWriter
from quire.frontend.http.api.output_plan import Plan
from quire.frontend.http.api.prompt_run import PromptRun, usage_of
from quire.frontend.text.output_parser import PIECE, OutputParser

_MANY_CHARS = 64 << 10  # the content blocks of a longer output are made in a thread


class Answer:
    """plan: None if the output is plain text. cut_by_context: the context has room for fewer tokens than max_tokens."""

    def __init__(
        self, name: str, model: str, body: MessagesRequest, plan: Plan | None, run: PromptRun, cut_by_context: bool
    ) -> None:
        self._name = name
        self._model = model
        self._body = body
        self._run = run
        self._cut_by_context = cut_by_context
        shows_reasoning = body.thinking is None or body.thinking.display != "omitted"
        parser = OutputParser(None, None) if plan is None else plan.new_parser()
        self._blocks = Blocks(parser, None if plan is None else plan.max_calls, shows_reasoning)
        self._reasoning = None if plan is None else plan.new_reasoning_count()
        self._writer = EventWriter()

    # ------------------------------------------------------------------------------------------------------- streaming
    def begin(self) -> bytes:
        """The events before the first output."""
        return self._writer.opening(self._message([], None, None))

    def read(self, delta: Delta) -> bytes:
        """The events of a delta, and, if it is the last, those of the message's end."""
        if self._reasoning is None and self._blocks.open is not None and delta.finish_reason is None:  # most deltas
            return self._writer.text(delta.text) if delta.text else b""
        events = b"".join(map(self._writer.step, self._steps(delta)))
        if delta.finish_reason is None:
            return events
        usage = msgspec.structs.replace(self._usage(), service_tier=msgspec.UNSET)
        return events + self._writer.closing(*self._stop(delta), usage)

    def _steps(self, delta: Delta) -> list[Step]:
        steps = self._blocks.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            steps += self._blocks.finish()
        self._count_reasoning(delta)
        return steps

    # ---------------------------------------------------------------------------------------------------- in one piece
    async def whole(self, delta: Delta) -> MessagesResponse:
        """The message, from the whole output. A long text is parsed in pieces, between which other requests have turns."""
        if self._body.max_tokens == 0:  # the one token that was generated is not shown
            self._run.num_tokens[0] = 0
            return self._message([], "max_tokens", None)
        steps: list[Step] = []
        piece = Slice()
        for start in range(0, len(delta.text), PIECE):
            steps += self._blocks.feed(delta.text[start : start + PIECE])
            if piece.is_over:
                await piece.next()
        steps += self._blocks.finish()
        self._count_reasoning(delta)
        is_long = len(delta.text) > _MANY_CHARS
        content = await in_thread(content_of, steps) if is_long else content_of(steps)
        return self._message(content, *self._stop(delta))

    # ------------------------------------------------------------------------------------------------------------ both
    def _count_reasoning(self, delta: Delta) -> None:
        if self._reasoning is not None:
            self._reasoning.add(self._run, delta, self._blocks.never_reasoned)

    def _stop(self, delta: Delta) -> tuple[str, str | None]:
        """The message's stop_reason and stop_sequence."""
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._cut_by_context else "max_tokens", None
        if isinstance(delta.stop_reason, str) and delta.stop_reason in (self._body.stop_sequences or ()):
            return "stop_sequence", delta.stop_reason
        return "tool_use" if self._blocks.num_calls else "end_turn", None

    def _message(self, content: list[ContentBlock], stop_reason: str | None, stop_sequence: str | None) -> MessagesResponse:
        return MessagesResponse(
            id=self._name,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        usage = usage_of([self._run])
        cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        reasoning = msgspec.UNSET if details is msgspec.UNSET else OutputTokensDetails(details.reasoning_tokens)
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=reasoning,
        )
