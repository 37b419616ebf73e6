"""What both generating routes share: running the streams of one HTTP request and sending what they yield.

A `PromptRun` is one prompt of it. `Streaming` sends server-sent events as they come; `collect` waits for the end. Whatever
happens, every stream is cancelled on the way out: a client that has gone, a failed neighbour, the server's shutdown.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineDown, EngineError, Stream
from quire.frontend.client.turns import turn
from quire.frontend.http.api.bodies.json_pieces import too_large, write_pieces
from quire.frontend.http.api.bodies.schemas import ChatLogprobs, CompletionLogprobs, SamplingFields, Usage
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.logs.request_log import RequestLog
from quire.frontend.http.api.logs.traced import note_runs
from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.metrics.request_metrics import count_first_token, count_request
from quire.frontend.http.api.prompt_run import PromptRun, RunningUsage, usage_of
from quire.frontend.http.api.sse import DONE, ChunkWriter
from quire.frontend.http.protocol.exchange import Response, ResponseState

# Least bytes of a token with logprobs in any answer, and of each alternative: to see early what will be too long.
_LEAST_OF_TOKEN, _LEAST_OF_ALTERNATIVE = 16, 8
_LOOK_S = 1.0
_MANY_RUNS = 64

T = TypeVar("T")


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


class running:
    """Around the life of a request's streams, which may be submitted inside: afterwards none runs, and all are counted.

    A class, for a generator as a context costs each request two microseconds more.
    """

    __slots__ = ("_log", "_metrics", "_name", "_runs")

    def __init__(self, name: str, runs: list[PromptRun], metrics: Metrics, log: RequestLog) -> None:
        self._name, self._runs, self._metrics, self._log = name, runs, metrics, log

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        metrics = self._metrics
        for run in self._runs:
            if not run.stream.finished:
                metrics.count("request_success", "abort")
                run.stream.cancel()
            elif isinstance(run.stream.error, EngineError | EngineDown):
                metrics.count("request_success", "error")
            count_request(metrics, run)
        self._log.ended(self._name, self._runs)
        note_runs(self._name, self._runs)


async def run_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side; the first failure stops the others and is raised as itself."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        results = []
        for task in tasks:
            if task.done():
                results.append(task.result())
        return results
    finally:  # not a TaskGroup, which would wait for all to have ended before anyone learns that the client has gone
        for task in tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # asyncio would log those that nobody has looked at
        del task, tasks  # a failure refers to this frame, which would wait for the garbage collector with all that it knows


async def collect(runs: Sequence[PromptRun], metrics: Metrics, most_bytes: int | None = None) -> list[list[Delta]]:
    """Every prompt's merged deltas, by child. most_bytes: of the answer; raises ApiError 400 when that cannot be kept to."""
    results = await run_all([_collect(run, most_bytes) for run in runs])
    for run, deltas in zip(runs, results, strict=True):
        for delta in deltas:
            run.num_tokens[delta.index] = delta.num_tokens
            run.finish_reasons[delta.index] = delta.finish_reason
            metrics.count("request_success", delta.finish_reason or "abort")
    return results


async def _collect(run: PromptRun, most_bytes: int | None) -> list[Delta]:
    """One prompt's. With logprobs, a token is so many bytes of the answer: what gets too long is ended when it does."""
    params = run.params
    if most_bytes is None or params.logprobs is None or not isinstance(run.stream, Stream):
        return await run.collect()
    most_tokens = most_logprobs(most_bytes, params.logprobs)
    if params.max_tokens is not None and params.n * params.max_tokens <= most_tokens:
        return await run.collect()
    task = asyncio.ensure_future(run.collect())
    try:
        while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
            if run.stream.num_output_tokens > most_tokens:
                raise too_large(most_bytes)
        return task.result()
    finally:
        task.cancel()
        del task  # as in run_all: its exception refers to this frame


def most_logprobs(most_bytes: int, num_top: int) -> int:
    """Tokens with so many alternatives that an answer of this length can hold at most."""
    return most_bytes // (_LEAST_OF_TOKEN + _LEAST_OF_ALTERNATIVE * num_top)


def includes_usage(body: SamplingFields) -> bool:
    """OpenAI's stream_options.include_usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def follow(stream: Stream, response: Response, write: Callable[[Delta], bytes]) -> None:
    """Send what `write` makes of each delta when it comes, to the end or until the client reads too slowly: wait for it then.

    For a stream of one child that has sent something.
    """
    send = response.write

    def sink(delta: Delta) -> bool:
        if data := write(delta):
            send(data)
        return not response.write_paused

    await stream.follow(sink)
    if response.write_paused:
        await response.drain()


class Streaming:
    """One response as server-sent events. Its head goes out with the first output, so that an earlier failure still has a
    status of its own. One write for all that a stream yields in one turn; a client that reads slowly stops its streams' pumps,
    and what comes meanwhile is merged by the client (`Stream`), at most a request's whole output."""

    def __init__(
        self,
        response: Response,
        chunks: ChunkWriter,
        answer_format: AnswerFormat,
        runs: list[PromptRun],
        body: SamplingFields,
        metrics: Metrics,
    ) -> None:
        options = body.stream_options
        self._response = response
        self._chunks = chunks
        self._format = answer_format
        self._runs = runs
        self._metrics = metrics
        self._include_usage = includes_usage(body)
        self._usage_always = options is not None and options.usage_in_every_event
        self._token_ids = bool(body.return_token_ids)
        self._parsed = answer_format.parsed
        plain = self._parsed is None and not answer_format.wants_logprobs
        self._rich = not plain or self._token_ids or self._usage_always
        self._usage = RunningUsage(runs) if self._usage_always and len(runs) > 1 else None
        self._in_pieces: asyncio.Lock | None = None  # held while a large event is on its way

    async def run(self) -> None:
        await run_all([self._pump(run) for run in self._runs])
        last = self._chunks.usage(usage_of(self._runs)) if self._include_usage else b""
        self._response.end(last + DONE)

    async def _pump(self, run: PromptRun) -> None:
        has_begun, response = False, self._response
        many = len(self._runs) > _MANY_RUNS
        assert isinstance(run.stream, AsyncIterator)  # beams do not stream
        async for deltas in run.stream:
            if many:  # all of a step at once would keep others waiting: each has a turn of its own
                await turn()
            events: list[bytes] = []
            if not has_begun:
                has_begun = True
                count_first_token(self._metrics, run)
                if self._usage is not None:
                    self._usage.started(run)
                opening = self._format.opening(run, self._chunks, self._running_usage())
                events = opening if isinstance(opening, list) else await self._send_in_pieces(opening)
            for delta in deltas:
                events += self._events(run, delta)
            if events:
                if self._in_pieces is not None:
                    async with self._in_pieces:
                        pass
                data = b"".join(events) if len(events) > 1 else events[0]
                if response.state is ResponseState.STREAMING:
                    response.write(data)
                else:
                    self._begin(data)
                if response.write_paused:
                    await response.drain()
            if isinstance(run.stream, Stream) and self._is_alone(run) and response.state is ResponseState.STREAMING:
                await follow(run.stream, response, self._writer(run))

    def _is_alone(self, run: PromptRun) -> bool:
        """Whether one stream of one child is all that the response has."""
        return len(self._runs) == 1 and run.stream.params.n == 1

    def _writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        """What makes the chunks of a delta that does not end its stream."""
        if self._rich:
            return lambda delta: b"".join(self._events(run, delta))
        text_chunk, index = self._chunks.text, run.first_choice

        def plain(delta: Delta) -> bytes:
            run.num_tokens[0] = delta.num_tokens
            return text_chunk(index, delta.text) if delta.text else b""

        return plain

    def _events(self, run: PromptRun, delta: Delta) -> list[bytes]:
        """A delta's chunks, its end's among them."""
        run.num_tokens[delta.index] = delta.num_tokens
        events: list[bytes] = []
        if self._rich:
            events = self._rich_chunks(run, delta)
        elif delta.text:
            events = [self._chunks.text(run.first_choice + delta.index, delta.text)]
        if delta.finish_reason is not None:
            events.append(self._finish_chunk(run, delta))
        return events

    async def _send_in_pieces(self, parts: Iterable[bytes]) -> list[bytes]:
        """Others' events must not come between. Returns what is left to send: nothing."""
        if self._in_pieces is None:
            self._in_pieces = asyncio.Lock()
        async with self._in_pieces:
            if self._response.state is ResponseState.WAITING:
                self._response.start()
            await write_pieces(self._response, parts)
        return []

    def _begin(self, data: bytes) -> None:
        """The head, with the first events; or what comes when it is too late for that."""
        if self._response.state is ResponseState.WAITING:
            self._response.start(first=data)
        else:
            self._response.write(data)

    def _rich_chunks(self, run: PromptRun, delta: Delta) -> list[bytes]:
        if self._usage is not None:
            self._usage.num_tokens += len(delta.token_ids)
        if self._parsed is not None:
            ids = delta.token_ids if self._token_ids else None
            logprobs = self._format.logprobs(run, delta)
            assert not isinstance(logprobs, CompletionLogprobs)
            return self._parsed.chunks(run, delta, self._chunks, logprobs, ids, self._running_usage())
        if not delta.text and not delta.token_ids:
            return []
        chunk = self._chunks.rich_text(
            run.first_choice + delta.index,
            delta.text,
            logprobs=self._format.logprobs(run, delta),
            token_ids=delta.token_ids if self._token_ids else None,
            usage=self._running_usage(),
        )
        return [chunk]

    def _finish_chunk(self, run: PromptRun, delta: Delta) -> bytes:
        assert delta.finish_reason is not None
        run.finish_reasons[delta.index] = delta.finish_reason
        self._metrics.count("request_success", delta.finish_reason)
        index, reason = run.first_choice + delta.index, str(delta.finish_reason)
        if self._parsed is not None:
            reason = self._parsed.finish_reason(delta.index, delta.finish_reason)
        return self._chunks.finish(index, reason, delta.stop_reason, self._running_usage(), self._token_ids)

    def _running_usage(self) -> Usage | None:
        if self._usage is not None:
            return self._usage.now()
        return usage_of(self._runs) if self._usage_always else None
