"""Run the streams of one HTTP request: count what they yield and send it. All generating routes share this file.

A `PromptRun` is one prompt of the request. `Pump` sends server-sent events as deltas come; `collect` waits for the end. Both
run inside `running`: on the way out it cancels every stream that still runs (the client has disconnected, another stream
failed, the server stops), and counts, logs and traces the request. Routes decide what an answer looks like.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import DeadlineExceeded, EngineDown, EngineError, Stream
from quire.frontend.client.turns import turn
from quire.frontend.http.api.bodies.json_pieces import too_large, write_pieces
from quire.frontend.http.api.logs.request_log import RequestLog
from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.protocol.exchange import EVENT_STREAM, Response, ResponseState

# The least bytes that a token with logprobs takes in any answer, and each alternative: to stop early what will be too long.
_LEAST_OF_TOKEN, _LEAST_OF_ALTERNATIVE = 16, 8
_LOOK_S = 1.0
_MANY_RUNS = 64

T = TypeVar("T")
Events = bytes | Iterator[bytes]  # whole events; an iterator of pieces if they may be large


# ------------------------------------------------------------------------------------------------------- the whole request
class running:
    """A context for a request's streams, which may be submitted inside it: afterwards none runs, and all are counted.

    It is a class because a generator as a context costs two microseconds more a request.
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
            elif isinstance(run.stream.error, DeadlineExceeded) and run.stream.metrics.first_token_time is not None:
                metrics.count("request_success", "abort")
            count_request(metrics, run)
        self._log.ended(self._name, self._runs)
        note_runs(self._name, self._runs)


class Generated:
    """The runs of a traced request, noted when they are over. late: called with this object if the runs end after the answer
    was sent, as for responses in the background."""

    __slots__ = ("late", "name", "runs")

    def __init__(self) -> None:
        self.name = ""
        self.runs: list[PromptRun] = []
        self.late: Callable[[Generated], None] | None = None


generated_by: ContextVar[Generated | None] = ContextVar("generated", default=None)


def note_runs(name: str, runs: list[PromptRun]) -> None:
    """Tell tracing what the request of this task has generated; does nothing if the request is not traced."""
    generated = generated_by.get()
    if generated is not None:
        generated.name = name
        generated.runs += runs
        if generated.late is not None and runs:
            generated.late(generated)


# ----------------------------------------------------------------------------------------------------------------- metrics
def count_first_token(metrics: Metrics, run: PromptRun) -> None:
    """Observe the time to the first token as soon as that is there, once a request: the answer may take minutes more."""
    times = run.stream.metrics
    if run.has_begun or times.first_token_time is None:
        return
    run.has_begun = True
    metrics.observe("time_to_first_token_seconds", max(0.0, times.first_token_time - times.arrival_time))


def count_request(metrics: Metrics, run: PromptRun) -> None:
    """Observe the times and sizes of a request that has ended; nothing if it never had a token."""
    times, stream = run.stream.metrics, run.stream
    if times.first_token_time is None:
        return
    count_first_token(metrics, run)
    first = times.first_token_time
    last = max(times.last_token_time or first, first)
    end = times.finished_time or last
    metrics.observe("e2e_request_latency_seconds", max(0.0, end - times.arrival_time))  # negative if the clock was set back
    metrics.observe("request_decode_time_seconds", last - first)
    if times.queue_s is not None:
        prefill_s = max(0.0, first - times.arrival_time - times.queue_s)
        metrics.observe("request_queue_time_seconds", times.queue_s)
        metrics.observe("request_prefill_time_seconds", prefill_s)
        metrics.observe("request_inference_time_seconds", prefill_s + last - first)
    longest = max(run.num_tokens)
    if longest > 1:
        metrics.observe("request_time_per_output_token_seconds", (last - first) / (longest - 1))
    metrics.observe("request_prompt_tokens", stream.num_prompt_tokens)
    metrics.observe("request_prefill_kv_computed_tokens", stream.num_prompt_tokens - (stream.num_cached_tokens or 0))
    metrics.observe("request_generation_tokens", sum(run.num_tokens) + run.num_tokens_left_out)
    metrics.observe("request_max_num_generation_tokens", longest)
    metrics.observe("request_params_n", run.n)
    if run.max_tokens is not None:
        metrics.observe("request_params_max_tokens", run.max_tokens)


# ------------------------------------------------------------------------------------------------------------ in one piece
async def run_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. The first exception cancels the others and is raised unchanged."""
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
    finally:  # a TaskGroup would wait until all have ended before it tells that the client has disconnected
        for task in tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # retrieved, or asyncio would log it
        del task, tasks  # an exception refers to this frame: a cycle would keep all of it until the next garbage collection


async def collect(runs: Sequence[PromptRun], metrics: Metrics, most_bytes: int | None = None) -> list[list[Delta]]:
    """Every prompt's merged deltas, by child. most_bytes: limit of the answer; raises ApiError 400 if it will be longer."""
    results = await run_all([_collect(run, most_bytes) for run in runs])
    for run, deltas in zip(runs, results, strict=True):
        for delta in deltas:
            run.num_tokens[delta.index] = delta.num_tokens
            run.finish_reasons[delta.index] = delta.finish_reason
            metrics.count("request_success", delta.finish_reason or "abort")
    return results


async def _collect(run: PromptRun, most_bytes: int | None) -> list[Delta]:
    """One prompt's deltas. With logprobs, each token has a least size in the answer: an output that gets too long is ended."""
    max_tokens = run.params.max_tokens
    if most_bytes is None or run.num_logprobs is None or not isinstance(run.stream, Stream):
        return await run.collect()
    most_tokens = most_logprobs(most_bytes, run.num_logprobs)
    if max_tokens is not None and run.n * max_tokens <= most_tokens:
        return await run.collect()
    task = asyncio.ensure_future(run.collect())
    try:
        while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
            if run.stream.num_output_tokens > most_tokens:
                raise too_large(most_bytes)
        return task.result()
    finally:
        task.cancel()
        del task  # its exception refers to this frame, as in run_all


def most_logprobs(most_bytes: int, num_top: int) -> int:
    """The most tokens, each with num_top alternatives, that an answer of most_bytes can contain."""
    return most_bytes // (_LEAST_OF_TOKEN + _LEAST_OF_ALTERNATIVE * num_top)


# --------------------------------------------------------------------------------------------------------------- streaming
class StreamedAnswer(Protocol):
    """A route's events for a stream. A delta is counted before its events are asked for."""

    def opening(self, run: PromptRun) -> Events:
        """Events before a prompt's first text."""

    def events(self, run: PromptRun, delta: Delta) -> Events:
        """A delta's events, with its end's."""

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes] | None:
        """A faster `events` for a stream of one child, for deltas without a finish_reason; None if there is none."""

    async def closing(self) -> Events:
        """The last events, when all streams have ended."""


class Pump:
    """Reads one response's streams and sends their server-sent events.

    The head goes out with the first output, so an earlier failure still has a status of its own. All that a stream yields in
    one turn is one write. While a client reads slowly, its streams are not read; the engine's client merges what arrives
    meanwhile (`Stream`), at most a request's whole output.
    """

    def __init__(
        self,
        response: Response | None,
        runs: Sequence[PromptRun],
        metrics: Metrics,
        answer: StreamedAnswer,
        shown: Callable[[Delta], Delta] | None = None,
        content_type: bytes = EVENT_STREAM,
    ) -> None:
        """response: None for an answer that reads deltas and sends no events. shown: returns the visible part of a delta."""
        self._response = response
        self._runs = runs
        self._metrics = metrics
        self._answer = answer
        self._shown = shown
        self._content_type = content_type
        self._in_pieces: asyncio.Lock | None = None  # held while a large event is sent

    async def run(self) -> None:
        """Send all events and end the response."""
        response = self._response
        assert response is not None
        await run_all([self.read(run) for run in self._runs])
        last = await self._answer.closing()
        if not isinstance(last, bytes):
            await self._send_in_pieces(last)
            last = b""
        elif response.state is ResponseState.WAITING:
            response.start(self._content_type)
        response.end(last)

    async def read(self, run: PromptRun) -> None:
        """Read one prompt's stream to its end: count its deltas and send their events."""
        has_begun, response, answer, stream = False, self._response, self._answer, run.stream
        many, sink = len(self._runs) > _MANY_RUNS, self._sink(run)
        assert isinstance(stream, AsyncIterator)  # beams do not stream
        async for deltas in stream:
            if many:  # one turn for each stream: all streams' deltas of a step at once would delay other requests
                await turn()
            parts: list[bytes] = []
            if not has_begun:
                has_begun = True
                count_first_token(self._metrics, run)
                if isinstance(opening := answer.opening(run), bytes):
                    parts.append(opening)
                else:
                    await self._send_in_pieces(opening)
            for delta in deltas:
                if self._shown is not None:
                    delta = self._shown(delta)
                self._count(run, delta)
                if isinstance(events := answer.events(run, delta), bytes):
                    parts.append(events)
                else:
                    await self._send_in_pieces(itertools.chain(parts, events))
                    parts = []
            if response is None:
                continue
            if data := b"".join(parts):
                if self._in_pieces is not None:
                    async with self._in_pieces:
                        pass
                if response.state is ResponseState.WAITING:
                    response.start(self._content_type, data)
                else:
                    response.write(data)
                if response.write_paused:
                    await response.drain()
            if sink is not None and response.state is ResponseState.STREAMING:
                await stream.follow(sink)  # type: ignore[union-attr]  # a sink is for a Stream
                if response.write_paused:
                    await response.drain()

    def _count(self, run: PromptRun, delta: Delta) -> None:
        run.num_tokens[delta.index] = delta.num_tokens
        if delta.finish_reason is not None:
            run.finish_reasons[delta.index] = delta.finish_reason
            self._metrics.count("request_success", delta.finish_reason)

    def _sink(self, run: PromptRun) -> Callable[[Delta], bool] | None:
        """A sink for Stream.follow, which sends each delta as it arrives until the client reads too slowly. None if the
        response has more than one stream of one child: their deltas of one turn are sent together."""
        response, stream = self._response, run.stream
        if response is None or len(self._runs) > 1 or not isinstance(stream, Stream) or stream.params.n > 1:
            return None
        if self._shown is not None or (write := self._answer.writer(run)) is None:
            return None
        send, num_tokens = response.write, run.num_tokens

        def sink(delta: Delta) -> bool:
            num_tokens[0] = delta.num_tokens
            if data := write(delta):
                send(data)
            return not response.write_paused

        return sink

    async def _send_in_pieces(self, parts: Iterable[bytes]) -> None:
        """Send pieces of events; events of other streams wait until the last piece."""
        response = self._response
        assert response is not None
        if self._in_pieces is None:
            self._in_pieces = asyncio.Lock()
        async with self._in_pieces:
            if response.state is ResponseState.WAITING:
                response.start(self._content_type)
            await write_pieces(response, parts)
