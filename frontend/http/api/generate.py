"""What both generating routes share: running the streams of one HTTP request and sending what they yield.

A `Job` is one prompt: its stream, its place among the choices, its counts. `Streaming` sends server-sent events as they come;
`collect` waits for the end. Whatever happens, every stream is cancelled on the way out: a client that has gone, a failed
neighbour, the server's shutdown.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from quire.frontend.client.async_client import EngineDown, EngineError, Stream
from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.http.api.metrics import Metrics
from quire.frontend.http.api.request_log import RequestLog
from quire.frontend.http.api.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokensDetails,
    SamplingFields,
    Usage,
)
from quire.frontend.http.api.sse import DONE, ChunkWriter
from quire.frontend.http.protocol.exchange import Response, State
from quire.ipc.messages import FinishReason
from quire.ipc.sampling import SamplingParams

T = TypeVar("T")


class Job:
    """One prompt of a request. first_choice: index of its first child among the response's choices."""

    __slots__ = ("_prompt_logprobs", "finish_reasons", "first_choice", "num_tokens", "params", "prompt_token_ids", "stream")

    def __init__(self, stream: Stream, params: SamplingParams, prompt_token_ids: Sequence[int], first_choice: int) -> None:
        self.stream = stream
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.first_choice = first_choice
        self.num_tokens = [0] * params.n  # output tokens by child
        self.finish_reasons: list[FinishReason | None] = [None] * params.n
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = None

    def prompt_logprobs(self) -> list[TokenLogprobDict | None] | None:
        """Once the first output is there. The stream builds them at each access: kept."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self.stream.prompt_logprobs
        return self._prompt_logprobs


class Shape(Protocol):
    """What differs between chat and completions in a stream."""

    logprobs_wanted: bool

    def opening(self, job: Job, chunks: ChunkWriter, usage: Usage | None) -> list[bytes]:
        """Chunks before a job's first text; with the usage so far, if it is wanted."""

    def logprobs(self, job: Job, delta: Delta) -> ChatLogprobs | CompletionLogprobs | None: ...


@asynccontextmanager
async def running(name: str, jobs: list[Job], metrics: Metrics, log: RequestLog) -> AsyncIterator[None]:
    """Around the life of a request's streams, which may be submitted inside: afterwards none runs, and all are counted."""
    try:
        yield
    finally:
        for job in jobs:
            if not job.stream.finished:
                metrics.count("request_success", "abort")
                job.stream.cancel()
            elif isinstance(job.stream.error, EngineError | EngineDown):
                metrics.count("request_success", "error")
            record(metrics, job)
        log.ended(name, jobs)


async def run_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side; the first failure stops the others and is raised as itself."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for task in done if (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        return [task.result() for task in tasks]
    finally:  # not a TaskGroup, which would wait for all to have ended before anyone learns that the client has gone
        for task in tasks:
            task.cancel()


async def collect(jobs: Sequence[Job], metrics: Metrics) -> list[list[Delta]]:
    """Every job's merged deltas, by child."""
    results = await run_all([job.stream.collect() for job in jobs])
    for job, deltas in zip(jobs, results, strict=True):
        for delta in deltas:
            job.num_tokens[delta.index] = delta.num_tokens
            job.finish_reasons[delta.index] = delta.finish_reason
            metrics.count("request_success", delta.finish_reason or "abort")
    return results


def usage_of(jobs: Sequence[Job]) -> Usage:
    prompt = sum(job.stream.num_prompt_tokens for job in jobs)
    completion = sum(sum(job.num_tokens) for job in jobs)
    cached = sum(job.stream.num_cached_tokens or 0 for job in jobs)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class Streaming:
    """One response as server-sent events. Its head goes out with the first output, so that an earlier failure still has a
    status of its own. One write for all that a stream yields in one turn; a client that reads slowly stops its streams' pumps,
    and what comes meanwhile is merged by the client (`Stream`), at most a request's whole output."""

    def __init__(
        self, response: Response, chunks: ChunkWriter, shape: Shape, jobs: list[Job], body: SamplingFields, metrics: Metrics
    ) -> None:
        options = body.stream_options
        self._response = response
        self._chunks = chunks
        self._shape = shape
        self._jobs = jobs
        self._metrics = metrics
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._token_ids = bool(body.return_token_ids)
        self._rich = shape.logprobs_wanted or self._token_ids or self._usage_always

    async def run(self) -> None:
        await run_all([self._pump(job) for job in self._jobs])
        last = self._chunks.usage(usage_of(self._jobs)) if self._include_usage else b""
        self._response.end(last + DONE)

    async def _pump(self, job: Job) -> None:
        latency, clock, previous = self._metrics.inter_token_latency, time.perf_counter, 0.0
        response, text_chunk, first = self._response, self._chunks.text, job.first_choice
        async for deltas in job.stream:
            now = clock()
            events: list[bytes] = []
            if previous:
                latency.observe(now - previous)
            else:
                events = self._shape.opening(job, self._chunks, self._running_usage())
            previous = now
            for delta in deltas:
                job.num_tokens[delta.index] = delta.num_tokens
                if self._rich:
                    events += self._rich_chunks(job, delta)
                elif delta.text:
                    events.append(text_chunk(first + delta.index, delta.text))
                if delta.finish_reason is not None:
                    events.append(self._finish_chunk(job, delta))
            if events:
                self._send(b"".join(events) if len(events) > 1 else events[0])
                if response.write_paused:
                    await response.drain()

    def _send(self, data: bytes) -> None:
        if self._response.state is State.WAITING:
            self._response.start(first=data)
        else:
            self._response.write(data)

    def _rich_chunks(self, job: Job, delta: Delta) -> list[bytes]:
        if not delta.text and not delta.token_ids:
            return []
        chunk = self._chunks.rich_text(
            job.first_choice + delta.index,
            delta.text,
            logprobs=self._shape.logprobs(job, delta),
            token_ids=delta.token_ids if self._token_ids else None,
            usage=self._running_usage(),
        )
        return [chunk]

    def _finish_chunk(self, job: Job, delta: Delta) -> bytes:
        assert delta.finish_reason is not None
        job.finish_reasons[delta.index] = delta.finish_reason
        self._metrics.count("request_success", delta.finish_reason)
        index = job.first_choice + delta.index
        return self._chunks.finish(index, delta.finish_reason, delta.stop_reason, self._running_usage())

    def _running_usage(self) -> Usage | None:
        return usage_of(self._jobs) if self._usage_always else None


def record(metrics: Metrics, job: Job) -> None:
    """The times and sizes of one request that has begun to answer."""
    times, stream = job.stream.metrics, job.stream
    if times.first_token_time is None:
        return
    num_tokens = sum(job.num_tokens)
    first = times.first_token_time
    last = max(times.last_token_time or first, first)
    end = times.finished_time or last
    metrics.observe("time_to_first_token_seconds", first - times.arrival_time)
    metrics.observe("e2e_request_latency_seconds", end - times.arrival_time)
    metrics.observe("request_decode_time_seconds", last - first)
    if times.queue_s is not None:
        metrics.observe("request_queue_time_seconds", times.queue_s)
        metrics.observe("request_prefill_time_seconds", max(0.0, first - times.arrival_time - times.queue_s))
    if num_tokens > job.params.n:
        metrics.observe("request_time_per_output_token_seconds", (last - first) / (max(job.num_tokens) - 1))
    metrics.observe("request_prompt_tokens", stream.num_prompt_tokens)
    metrics.observe("request_generation_tokens", num_tokens)
    metrics.observe("request_params_n", job.params.n)
    if job.params.max_tokens is not None:
        metrics.observe("request_params_max_tokens", job.params.max_tokens)
