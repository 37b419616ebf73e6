"""ChunkEvents: a stream's deltas as the chunks of /v1/chat/completions and /v1/completions, for the pump (generate.py) to send.

Plain text takes the quick way of `ChunkWriter` (sse.py). What differs between the two routes is an `AnswerFormat`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.schemas import ChatLogprobs, CompletionLogprobs, SamplingFields, Usage
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.prompt_run import PromptRun, RunningUsage, usage_of
from quire.frontend.http.api.sse import DONE, ChunkWriter


class AnswerFormat(Protocol):
    """What differs between chat and completions in a stream."""

    wants_logprobs: bool

    @property
    def parsed(self) -> ChatOutput | None:
        """None for plain text."""

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterable[bytes]:
        """Chunks before a prompt's first text; with the usage so far, if it is wanted. Not a list where they may be large: they
        are made and sent one after the other then, in any pieces."""

    def logprobs(self, run: PromptRun, delta: Delta) -> ChatLogprobs | CompletionLogprobs | None: ...


def includes_usage(body: SamplingFields) -> bool:
    """OpenAI's stream_options.include_usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


class ChunkEvents:
    """One response's chunks."""

    def __init__(
        self, chunks: ChunkWriter, answer_format: AnswerFormat, runs: Sequence[PromptRun], body: SamplingFields
    ) -> None:
        options = body.stream_options
        self._chunks = chunks
        self._format = answer_format
        self._runs = runs
        self._include_usage = includes_usage(body)
        self._usage_always = options is not None and options.usage_in_every_event
        self._token_ids = bool(body.return_token_ids)
        self._parsed = answer_format.parsed
        plain = self._parsed is None and not answer_format.wants_logprobs
        self._rich = not plain or self._token_ids or self._usage_always
        self._usage = RunningUsage(runs) if self._usage_always and len(runs) > 1 else None

    def opening(self, run: PromptRun) -> bytes | Iterator[bytes]:
        if self._usage is not None:
            self._usage.started(run)
        opening = self._format.opening(run, self._chunks, self._running_usage())
        return b"".join(opening) if isinstance(opening, list) else iter(opening)

    def events(self, run: PromptRun, delta: Delta) -> bytes:
        """A delta's chunks, its end's among them."""
        if self._rich:
            events = self._rich_chunks(run, delta)
        else:
            events = self._chunks.text(run.first_choice + delta.index, delta.text) if delta.text else b""
        return events if delta.finish_reason is None else events + self._finish_chunk(run, delta)

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        """As `events`, for deltas that end nothing."""
        if self._rich:
            return lambda delta: self._rich_chunks(run, delta)
        text_chunk, index = self._chunks.text, run.first_choice
        return lambda delta: text_chunk(index, delta.text) if delta.text else b""

    async def closing(self) -> bytes:
        return (self._chunks.usage(usage_of(self._runs)) if self._include_usage else b"") + DONE

    def _rich_chunks(self, run: PromptRun, delta: Delta) -> bytes:
        if self._usage is not None:
            self._usage.num_tokens += len(delta.token_ids)
        if self._parsed is not None:
            ids = delta.token_ids if self._token_ids else None
            logprobs = self._format.logprobs(run, delta)
            assert not isinstance(logprobs, CompletionLogprobs)
            return b"".join(self._parsed.chunks(run, delta, self._chunks, logprobs, ids, self._running_usage()))
        if not delta.text and not delta.token_ids:
            return b""
        return self._chunks.rich_text(
            run.first_choice + delta.index,
            delta.text,
            logprobs=self._format.logprobs(run, delta),
            token_ids=delta.token_ids if self._token_ids else None,
            usage=self._running_usage(),
        )

    def _finish_chunk(self, run: PromptRun, delta: Delta) -> bytes:
        assert delta.finish_reason is not None
        index, reason = run.first_choice + delta.index, str(delta.finish_reason)
        if self._parsed is not None:
            reason = self._parsed.finish_reason(delta.index, delta.finish_reason)
        return self._chunks.finish(index, reason, delta.stop_reason, self._running_usage(), self._token_ids)

    def _running_usage(self) -> Usage | None:
        if self._usage is not None:
            return self._usage.now()
        return usage_of(self._runs) if self._usage_always else None
