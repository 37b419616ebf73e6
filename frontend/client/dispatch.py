"""Dispatcher: passes arriving messages to their running requests. It owns the tables of one connection's requests.

It knows no socket: messages arrive by method calls, and messages for the core leave through `send`. `outputs` is the frontend's
hot path, called once per step message with all its tokens: a handful of Python operations per token, everything else per
request or per message. Requests that have ended leave the tables; their Streams keep their state.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np

from quire.frontend.client.output_sequence import OutputSequence
from quire.frontend.client.pooling import PooledState
from quire.frontend.client.stream import ClientError, EngineError, RequestState
from quire.ipc.messages.frontend import (
    Abort,
    Finish,
    FrontendMessage,
    Pooled,
    PromptLogprobs,
    Started,
    StepOutputs,
    sequence_key,
)
from quire.ipc.pooling import VECTOR
from quire.ipc.sampling import SamplingParams

_DROPPED_S = 60.0


class Dispatcher:
    """Requests by id, their children by key, and the handling of messages about them."""

    def __init__(self, send: Callable[[FrontendMessage], None]) -> None:
        self._send = send
        self._epoch = 0
        self._eos_token_ids: frozenset[int] = frozenset()
        self.requests: dict[int, RequestState | PooledState] = {}
        self._sequences: dict[int, OutputSequence] = {}
        # Dropped children with logprobs: their rows may still arrive, and must be skipped.
        self._dropped_sequences: dict[int, float] = {}

    def begin(self, epoch: int, eos_token_ids: Iterable[int]) -> None:
        """Begin a new connection; the tables are empty."""
        self._epoch, self._eos_token_ids = epoch, frozenset(eos_token_ids)

    def add(self, request: RequestState | PooledState) -> None:
        self.requests[request.id] = request
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._sequences[sequence.key] = sequence

    def cancel(self, request_id: int) -> None:
        """Abort a request; nothing if it has ended."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._drop(request)
            request.abort()
            self._send(Abort(self._epoch, [request_id]))

    def release(self, request_id: int) -> RequestState | PooledState | None:
        """Remove a request so that another engine's dispatcher can continue it; None if it has ended."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            for sequence in request.sequences:
                self._sequences.pop(sequence.key, None)
        return request

    def release_all(self) -> list[RequestState | PooledState]:
        """The core is lost: remove all requests, so that another core can continue them."""
        requests = list(self.requests.values())
        self.requests.clear()
        self._sequences.clear()
        self._dropped_sequences.clear()
        return requests

    def abort_sent(self, request_id: int, params: SamplingParams | None) -> None:
        """Abort a request that was sent and is not in the tables. params: if it generates."""
        if params is not None and params.logprobs is not None:
            self._dropped_sequences.update((sequence_key(request_id, child), time.monotonic()) for child in range(params.n))
        self._send(Abort(self._epoch, [request_id]))

    def fail(self, request_id: int, error: ClientError) -> None:
        """The core has failed a request."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._drop(request)
            request.fail(error)

    def fail_all(self, error: ClientError) -> None:
        """The core is lost: fail all requests."""
        for request in self.release_all():
            request.fail(error)

    def _drop(self, request: RequestState | PooledState) -> None:
        for sequence in request.sequences:
            if self._sequences.pop(sequence.key, None) is not None and sequence.logprobs is not None:
                self._dropped_sequences[sequence.key] = time.monotonic()

    # ------------------------------------------------------------------------------------------------- messages
    def outputs(self, message: StepOutputs) -> None:
        """Handle a step's tokens. Order matters: a sequence's end must be known when its last tokens are decoded."""
        news: list[RequestState] = []
        eager: dict[OutputSequence, None] = {}
        if message.started:
            self._started(message.started)
        if message.drafts:
            self._drafts(message.drafts)
        find, rows = self._sequences.get, iter(message.logprobs)
        keys = np.frombuffer(message.keys, "<i8").tolist()
        for key, token in zip(keys, np.frombuffer(message.tokens, "<i4").tolist(), strict=True):
            sequence = find(key)
            if sequence is None:
                if key in self._dropped_sequences:
                    next(rows, None)
                continue
            sequence.ids.append(token)
            request: RequestState = sequence.request
            if not request.news:
                request.news = True
                news.append(request)
            if sequence.plain:
                continue
            if sequence.logprobs is not None:
                if (row := next(rows, None)) is None:
                    sequence.ids.pop()  # a token without its row is not delivered
                    return self._inconsistent()
                sequence.logprobs.append(row)
            if sequence.eager:
                eager[sequence] = None
        for end in message.finished:
            self._dropped_sequences.pop(end.key, None)
            if (sequence := self._sequences.pop(end.key, None)) is not None:
                request = sequence.request
                request.end(sequence, end.reason, end.stop_token_id, self._stop_reason(request.params, end.stop_token_id))
                if sequence.eager:
                    eager[sequence] = None
                self._ended(request, news)
        for sequence in eager:
            self._decode(sequence, news)
        for request in news:
            request.wake()

    def _started(self, started: list[Started]) -> None:
        now = time.time()
        for start in started:
            sequence = self._sequences.get(start.key)
            if sequence is not None and sequence.request.num_cached_tokens is None:
                sequence.request.num_cached_tokens, sequence.request.seed = start.num_cached_tokens, start.seed
                sequence.request.metrics.queue_s = start.queue_s
                sequence.request.metrics.first_token_time = now

    def _drafts(self, drafts: bytes) -> None:
        for key, verified, accepted in np.frombuffer(drafts, "<i8").reshape(-1, 3).tolist():
            if (sequence := self._sequences.get(key)) is not None:
                metrics = sequence.request.metrics
                metrics.drafts = metrics.drafts or []
                metrics.drafts.append((verified, accepted))

    def _decode(self, sequence: OutputSequence, news: list[RequestState]) -> None:
        """Decode new tokens and look for stop strings; at one, end the sequence if the core has not."""
        running = sequence.finish_reason is None
        sequence.decode()
        if running and sequence.finish_reason is not None:
            del self._sequences[sequence.key]
            if sequence.logprobs is not None:
                self._dropped_sequences[sequence.key] = time.monotonic()
            request: RequestState = sequence.request
            request.close(sequence)
            self._ended(request, news)
            self._send(Finish(self._epoch, sequence.key))

    def _ended(self, request: RequestState, news: list[RequestState]) -> None:
        """A child has ended: wake the consumer, even one that waits only for the end."""
        request.news = True
        news.append(request)
        if not request.num_open:
            self.requests.pop(request.id, None)

    def _stop_reason(self, params: SamplingParams, stop_token_id: int | None) -> int | None:
        """The stop token's id; None for one of the model's own end-of-sequence tokens."""
        is_eos = stop_token_id in self._eos_token_ids and not params.ignore_eos
        return None if is_eos else stop_token_id

    def _inconsistent(self) -> None:
        """The message has fewer logprobs than tokens that need them: none of it can be trusted."""
        ids = list(self.requests)
        self.fail_all(EngineError("the engine's answers do not fit together"))
        self._send(Abort(self._epoch, ids))

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        request = self.requests.get(message.id)
        if isinstance(request, RequestState):
            request.add_prompt_logprobs(message)

    def pooled(self, message: Pooled) -> list[int]:
        """Handle a step's vectors and scores; returns the ids of the requests that have ended with them."""
        shapes, at, ended = np.frombuffer(message.shapes, "<i4").reshape(-1, 4).tolist(), 0, list[int]()
        data = np.frombuffer(message.data, "<f4")
        keys, cached = (
            np.frombuffer(column, kind).tolist() for column, kind in ((message.keys, "<i8"), (message.cached, "<i4"))
        )
        for key, (rows, columns, start, is_last), num_cached in zip(keys, shapes, cached, strict=True):
            part = data[at : at + (1 if rows == VECTOR else rows) * columns]
            at += len(part)
            request = self.requests.get(key >> 8)
            if not isinstance(request, PooledState):
                continue
            request.take(key & 255, part if rows == VECTOR else part.reshape(rows, columns), start, bool(is_last), num_cached)
            if not request.num_open:
                del self.requests[key >> 8]
                ended.append(key >> 8)
        return ended

    def forget_long_dropped(self) -> None:
        """Forget children dropped long ago: their rows that were in flight have arrived. Called at every Heartbeat."""
        now = time.monotonic()
        for key, dropped_at in list(self._dropped_sequences.items()):
            if now - dropped_at < _DROPPED_S:
                return  # the rest was dropped later
            del self._dropped_sequences[key]

    def check(self) -> None:
        """Assert that the tables agree: every open child of every request is found, and nothing else."""
        found = {s.key for r in self.requests.values() for s in r.sequences if s.finish_reason is None}
        assert found == self._sequences.keys()
        assert all(r.num_open > 0 for r in self.requests.values())
        generating = [r for r in self.requests.values() if isinstance(r, RequestState)]
        assert all(r.num_open == sum(s.finish_reason is None for s in r.sequences) for r in generating)
        assert not self._dropped_sequences.keys() & self._sequences.keys()
