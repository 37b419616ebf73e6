"""Server-sent events of the two generating routes, from pre-encoded bytes.

All of a chunk but its text is known when the stream begins, so it is encoded once for each choice; a token costs one JSON
escape and two concatenations. Chunks with logprobs, token ids or usage take a second path, which gives the same bytes without
those. A response has one `ChunkWriter`, which knows neither the connection nor the engine. `ChunkEvents` turns a stream's
deltas into chunks, which the pump (generate.py) sends; an `AnswerFormat` has what differs between the routes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.draft_metrics import AnswerMetrics
from quire.frontend.http.api.bodies.schemas import ChatLogprobs, CompletionLogprobs, SamplingFields, Usage
from quire.frontend.http.api.metrics.draft_metrics import draft_metrics
from quire.frontend.http.api.prompt_run import PromptRun, RunningUsage, usage_of
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.messages.frontend import DraftsTold, FinishReason

DONE = b"data: [DONE]\n\n"

json_bytes = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its status line."""
    return error.event % error.body()


class ChunkWriter:
    """Chunks of one response; each method returns one whole event.

    num_choices: prompts times n. null_usage: every chunk has "usage": null (OpenAI's include_usage).
    """

    def __init__(
        self,
        kind: Literal["chat", "completion"],
        *,
        id: str,
        created: int,
        model: str,
        num_choices: int,
        null_usage: bool = False,
    ) -> None:
        chat = kind == "chat"
        name = b"chat.completion.chunk" if chat else b"text_completion"
        names = json_bytes(id), name, created, json_bytes(model)
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,' % names
        opening = b'"delta":{' if chat else b""
        field = b'"content":' if chat else b'"text":'
        self._openings = [self._head + b'"choices":[{"index":%d,' % i + opening for i in range(num_choices)]
        self._texts = [before + field for before in self._openings]
        self._close_delta = b"}" if chat else b""
        self._finish_delta = b"}" if chat else b'"text":""'
        self._no_usage = b',"usage":null' if null_usage else b""
        self._after_text = self._close_delta + b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"

    def text(self, index: int, text: str) -> bytes:
        return self._texts[index] + json_bytes(text) + self._after_text

    def rich_text(
        self,
        index: int,
        text: str,
        *,
        logprobs: ChatLogprobs | CompletionLogprobs | None = None,
        token_ids: list[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        return self._texts[index] + json_bytes(text) + self._close_delta + self._tail(logprobs, token_ids, usage)

    def prompt_pieces(
        self,
        index: int,
        text: str,
        *,
        logprobs: Iterable[bytes] | None,
        prompt_token_ids: Iterable[bytes] | None,
        usage: Usage | None,
    ) -> Iterator[bytes]:
        """As `rich_text`, for a prompt, which may be long: logprobs and ids are JSON in pieces."""
        yield self._texts[index] + json_bytes(text) + self._close_delta + b',"logprobs":'
        yield from (b"null",) if logprobs is None else logprobs
        yield b',"finish_reason":null'
        if prompt_token_ids is not None:
            yield b',"token_ids":[],"prompt_token_ids":'
            yield from prompt_token_ids
        yield b"}]%b}\n\n" % self._usage(usage)

    def delta(
        self,
        index: int,
        fields: bytes,
        *,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """A chunk of a chat choice with parsed output. fields: the delta, a JSON object."""
        return self._openings[index] + fields[1:] + self._tail(logprobs, token_ids, usage)

    def _tail(
        self, logprobs: ChatLogprobs | CompletionLogprobs | None, token_ids: list[int] | None, usage: Usage | None
    ) -> bytes:
        """The bytes after the text of a chunk that is not its choice's last."""
        ids = b"" if token_ids is None else b',"token_ids":' + json_bytes(token_ids)
        return b',"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (json_bytes(logprobs), ids, self._usage(usage))

    def role(
        self,
        index: int,
        role: str,
        *,
        prompt_token_ids: list[int] | None = None,
        prompt_text: str | None = None,
        usage: Usage | None = None,
        content: bytes = b'""',
    ) -> bytes:
        """The first chunk of a chat choice."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + json_bytes(prompt_token_ids)
        ids += b"" if prompt_text is None else b',"prompt_text":' + json_bytes(prompt_text)
        delta = b'"role":%b,"content":%b},"logprobs":null,"finish_reason":null}]' % (json_bytes(role), content)
        return self._openings[index] + delta + ids + self._usage(usage) + b"}\n\n"

    def finish(
        self,
        index: int,
        finish_reason: str,
        stop_reason: int | str | None,
        usage: Usage | None = None,
        token_ids: bool = False,
    ) -> bytes:
        """The last chunk of a choice. token_ids: it has an empty list of them, for clients that concatenate the lists."""
        ids = b',"token_ids":[]' if token_ids else b""
        reason = json_bytes(finish_reason), json_bytes(stop_reason), ids, self._usage(usage)
        tail = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b%b}]%b}\n\n' % reason
        return self._openings[index] + self._finish_delta + tail

    def usage(self, usage: Usage, metrics: AnswerMetrics | msgspec.UnsetType | None = msgspec.UNSET) -> bytes:
        more = b"" if metrics is msgspec.UNSET else b',"metrics":' + json_bytes(metrics)
        return self._head + b'"choices":[],"usage":' + json_bytes(usage) + more + b"}\n\n"

    def _usage(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + json_bytes(usage)


# -------------------------------------------------------------------------------------------------------- deltas to chunks
class ParsedOutput(Protocol):
    """Makes the chunks of parsed output (chat_output.py)."""

    def chunks(
        self,
        run: PromptRun,
        delta: Delta,
        writer: ChunkWriter,
        logprobs: ChatLogprobs | None,
        token_ids: list[int] | None,
        usage: Usage | None,
    ) -> list[bytes]: ...
    def finish_reason(self, index: int, reason: FinishReason) -> str: ...


class AnswerFormat(Protocol):
    """The differences between chat and completions in a stream."""

    wants_logprobs: bool

    @property
    def parsed(self) -> ParsedOutput | None:
        """None for plain text."""

    def opening(self, run: PromptRun, chunks: ChunkWriter, usage: Usage | None) -> Iterable[bytes]:
        """Chunks before a prompt's first text. usage: so far; None if it is not wanted. Returns no list but an iterator if the
        chunks may be large: then they are made and sent piece by piece."""

    def logprobs(self, run: PromptRun, delta: Delta) -> ChatLogprobs | CompletionLogprobs | None: ...


def includes_usage(body: SamplingFields) -> bool:
    """OpenAI's stream_options.include_usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


class ChunkEvents:
    """The events of one response (generate.StreamedAnswer)."""

    def __init__(
        self,
        chunks: ChunkWriter,
        answer_format: AnswerFormat,
        runs: Sequence[PromptRun],
        body: SamplingFields,
        told: DraftsTold | None,
    ) -> None:
        options = body.stream_options
        self._chunks = chunks
        self._format = answer_format
        self._runs = runs
        self._told = told
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
        """A delta's chunks; the last one if it has a finish_reason."""
        if self._rich:
            events = self._rich_chunks(run, delta)
        else:
            events = self._chunks.text(run.first_choice + delta.index, delta.text) if delta.text else b""
        return events if delta.finish_reason is None else events + self._finish_chunk(run, delta)

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        """As `events`, for deltas without a finish_reason."""
        if self._rich:
            return lambda delta: self._rich_chunks(run, delta)
        text_chunk, index = self._chunks.text, run.first_choice
        return lambda delta: text_chunk(index, delta.text) if delta.text else b""

    async def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._chunks.usage(usage_of(self._runs), draft_metrics(self._runs, self._told)) + DONE

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
