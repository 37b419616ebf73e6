"""One submitted request: `Stream`, which its consumer reads, and the state behind it, to which arriving messages write.

Tokens are appended as they arrive and decoded when the consumer takes them, so a consumer that is late, or wants only the end,
pays once for many tokens. A sequence with stop strings is decoded on arrival instead, as the core must be told of its end at
once. A sequence keeps only output not taken yet, so a slow consumer costs at most the memory of the request's output.
Everything happens in the event loop's thread, except `Stream.__del__`.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from quire.frontend.client.logprob_rows import PromptLogprobRows
from quire.frontend.client.media import PlacedItem
from quire.frontend.client.output_sequence import OutputSequence
from quire.frontend.client.outputs import Delta, RequestMetrics, TokenLogprobDict
from quire.frontend.client.turns import Slice, turn
from quire.frontend.text.detokenizer import PROMPT_TAIL, OutputText
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import AddRequest, FinishReason, PromptLogprobs, RequestError
from quire.ipc.sampling import SamplingParams

MOST_TOKENS = 16 << 10  # per `take`: some 2 ms
MOST_ROWS = 160  # per `take`, with logprobs: reading a row of 20 takes 20 us; 128 children get one each per step


class ClientError(Exception):
    """Base class of a request's errors; the text is for the user and holds nothing secret. retry_after_s: when the request may
    be sent again; 0: not known."""

    retry_after_s = 0


class InvalidRequest(ClientError, ValueError):
    """The request itself is wrong: HTTP 400. A ValueError too, so that Python callers need not know this class."""


class NotFound(InvalidRequest):
    """The request's model does not exist: HTTP 404."""


class TooLong(InvalidRequest):
    """The prompt leaves no room for a token in the context (or the KV cache): HTTP 400."""


class Overloaded(ClientError):
    """The core's queue of waiting requests is full, or takes too long: HTTP 503 with Retry-After."""


class RateLimited(ClientError):
    """The request's API key has all that it may have: HTTP 429 with Retry-After."""


class DeadlineExceeded(ClientError):
    """The request's timeout has passed, or would before it began: HTTP 504."""


class EngineDown(ClientError):
    """There is no core, or it was lost while the request ran: HTTP 503 with Retry-After. The client reconnects by itself."""


class EngineError(ClientError):
    """The engine failed on this request (a worker died): HTTP 500."""


class MediaFailed(EngineError):
    """The model's encoder failed on an item of the request: HTTP 500."""


ERRORS: dict[str, type[ClientError]] = {  # by the core's error code
    "invalid": InvalidRequest,
    "not_found": NotFound,
    "too_long": TooLong,
    "overloaded": Overloaded,
    "rate_limited": RateLimited,
    "deadline_exceeded": DeadlineExceeded,
    "unavailable": EngineDown,
    "engine_error": EngineError,
    "media_failed": MediaFailed,
}


def error_of(message: RequestError) -> ClientError:
    """The error that the core has sent."""
    error = ERRORS[message.code](message.message)
    error.retry_after_s = message.retry_after_s
    return error


class RequestState:
    """One request and its children, between arriving messages (the client) and a Stream."""

    __slots__ = ("_last_reported", "_most", "_prompt_logprobs", "_prompt_token_ids", "_tokenizer", "_waiter", "deadline",
                 "error", "id", "is_behind", "items", "lost_at", "metrics", "name", "news", "num_cached_tokens", "num_losses",
                 "num_open", "num_prompt_tokens", "params", "seed", "sent", "sequences", "sink", "terms")  # fmt: skip

    def __init__(
        self,
        request_id: int,
        name: str,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival_time: float,
    ) -> None:
        """prompt_token_ids: int32 [n]; kept only if their logprobs are wanted. arrival_time: seconds since the Unix epoch."""
        self.id = request_id
        self.name = name
        self.params = params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.metrics = RequestMetrics(arrival_time)
        self.num_cached_tokens: int | None = None
        self.error: ClientError | None = None
        self.deadline = math.inf  # by time.monotonic()
        self.num_open = params.n  # children that have not ended
        self.news = False  # there is something to take; while this is set, no wake-up is needed
        self.is_behind = False  # the last `take` has left some output
        self._most = MOST_TOKENS if params.logprobs is None else MOST_ROWS
        self.sequences = [OutputSequence(self, i, self._new_text(prompt_token_ids, tokenizer)) for i in range(params.n)]
        self._tokenizer = tokenizer
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[Delta], bool] | None = None  # set by `Stream.follow`
        self._last_reported = [False] * params.n  # whether a child's finish_reason was taken
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._prompt_token_ids = prompt_token_ids.tolist() if params.prompt_logprobs is not None else None
        # for another engine, if this one is lost (resend.py)
        self.sent: AddRequest | None = None  # as it was sent first
        self.terms: Any = None  # its Terms (terms.py)
        self.items: Sequence[PlacedItem] = ()  # its media; the engine may ask for their tensors
        self.seed: int | None = None  # as the engine says with the first token
        self.lost_at = -1  # output tokens at the last loss of its engine
        self.num_losses = 0  # since the last token

    def _new_text(self, prompt_token_ids: np.ndarray, tokenizer: Tokenizer | None) -> OutputText | None:
        if tokenizer is None or not self.params.detokenize:
            return None
        return OutputText(tokenizer, self.params, prompt_token_ids[-PROMPT_TAIL:].tolist())

    # -------------------------------------------------------------------------------------------- what the client writes
    def end(self, sequence: OutputSequence, reason: FinishReason, stop_token_id: int | None, stop_reason: int | None) -> None:
        """A child has ended; its last tokens are in `ids`."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.stop_token = stop_token_id is not None
        self.close(sequence)

    def close(self, sequence: OutputSequence) -> None:
        """A child has its finish_reason and gets no more messages."""
        sequence.request = None  # breaks a reference cycle
        self.num_open -= 1
        if not self.num_open:
            self.metrics.finished_time = time.time()

    def fail(self, error: ClientError) -> None:
        """End all children with this error, which is raised after the output so far was taken."""
        if self.num_open:
            self.error, self.num_open = error, 0
            for sequence in self.sequences:
                sequence.request = None  # as in `close`
            self.metrics.finished_time = time.time()
            self.wake()

    def abort(self) -> None:
        """End the children that still run."""
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self.end(sequence, "abort", None, None)
                if sequence.eager:
                    sequence.decode()  # the text that was held back
        self.news = True
        self.wake()

    def add_prompt_logprobs(self, message: PromptLogprobs) -> None:
        rows = self._prompt_logprobs
        while rows and rows[-1].start >= message.start:  # left from before a preemption, with other chunks
            rows.pop()
        rows.append(message)

    def wake(self) -> None:
        error: BaseException | None = None
        if self.sink is not None:
            try:
                if self._feed_sink(self.sink):
                    return
            except BaseException as caught:  # raised in `follow`, not in the dispatch of other requests' tokens
                error = caught
            self.sink = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(None)

    def _feed_sink(self, sink: Callable[[Delta], bool]) -> bool:
        """Whether the sink took the new output and wants more. It gets neither the end nor more than one turn's tokens."""
        only = self.sequences[0]
        if not self.num_open or not 0 < len(only.ids) <= self._most:
            return False
        self.news = False
        self.metrics.last_token_time = time.time()
        return sink(only.take(self._tokenizer))

    # ------------------------------------------------------------------------------------------- what the consumer reads
    def wait(self) -> asyncio.Future[None]:
        """A future that is done at the next `wake`. One consumer at a time."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take(self) -> list[Delta]:
        """A Delta for each child with new output. A consumer that is far behind gets at most one turn's tokens, and the rest in
        the next turns of the event loop (is_behind)."""
        self.news = self.is_behind = False
        self.metrics.last_token_time = time.time()
        if len(self.sequences) == 1 and 0 < len((only := self.sequences[0]).ids) <= self._most:  # the usual case
            self._last_reported[0] = only.finish_reason is not None
            return [only.take(self._tokenizer)]
        deltas, room = [], self._most
        for sequence in self.sequences:
            if sequence.ids or (sequence.finish_reason is not None and not self._last_reported[sequence.index]):
                if len(sequence.ids) > room:
                    self.news = self.is_behind = True
                    if room:
                        deltas.append(sequence.take_some(self._tokenizer, room))
                    break
                room -= len(sequence.ids)
                deltas.append(sequence.take(self._tokenizer))
                self._last_reported[sequence.index] = sequence.finish_reason is not None
        return deltas

    async def take_all(self) -> list[Delta]:
        """All new output in one Delta per child; long text is decoded over several turns of the loop."""
        if sum([len(sequence.ids) for sequence in self.sequences]) > MOST_TOKENS:
            piece = Slice()
            for sequence in self.sequences:
                while sequence.decode_some(MOST_TOKENS // 4):
                    if piece.is_over:
                        await piece.next()
        self._most = sys.maxsize
        return self.take()

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, log-probabilities float32), most likely first."""
        m = self._prompt_logprobs[-1]
        return np.frombuffer(m.top_ids, "<i4"), np.frombuffer(m.top_logprobs, "<f4")

    def prompt_logprobs(self) -> "PromptLogprobRows | None":
        ids = self._prompt_token_ids
        return None if ids is None else PromptLogprobRows(ids, self._prompt_logprobs, self._tokenizer)


class Stream:
    """The tokens of one submitted request: an async iterator of `list[Delta]`, at most one Delta per child and turn.

    Each turn yields everything that has arrived since the last, so a slow consumer costs at most the memory of the output.
    Iteration ends when every child has finished, and raises the request's ClientError if it failed. Dropping the
    last reference to a Stream that has not ended aborts the request.
    """

    def __init__(self, state: RequestState, cancel: Callable[[int], None]) -> None:
        self._state = state
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    @property
    def id(self) -> int:
        """Unique within the client's connection."""
        return self._state.id

    @property
    def request_name(self) -> str:
        return self._state.name

    @property
    def params(self) -> SamplingParams:
        """As sent: max_tokens reduced to the context's room, bad words as token ids."""
        return self._state.params

    def show_special_tokens(self, token_ids: frozenset[int]) -> None:
        """Keep these tokens in the text, though skip_special_tokens removes others. Call this right after submitting."""
        for sequence in self._state.sequences:
            if sequence.text is not None:
                sequence.text.show(token_ids)

    def mark_tokens(self, marks: Mapping[int, str]) -> None:
        """Show these tokens as these texts, for a parser. Call this right after submitting."""
        for sequence in self._state.sequences:
            if sequence.text is not None:
                sequence.text.mark(marks)

    @property
    def num_prompt_tokens(self) -> int:
        return self._state.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; known with the first token."""
        return self._state.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all children so far, including those not taken yet."""
        return sum(sequence.num_tokens for sequence in self._state.sequences)

    @property
    def metrics(self) -> RequestMetrics:
        return self._state.metrics

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobDict | None] | None:
        """One entry per prompt token, the first one None; complete with the first Delta. None unless asked for.

        An entry is built on access, which takes some microseconds.
        """
        return self._state.prompt_logprobs()

    @property
    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, log-probabilities float32) of the most likely next tokens, most likely first. Available when a request
        that asked for them has ended."""
        return self._state.candidates()

    @property
    def finished(self) -> bool:
        """Whether the request has ended; the last Deltas may still wait to be taken."""
        return not self._state.num_open

    @property
    def error(self) -> ClientError | None:
        """The request's error, if it failed."""
        return self._state.error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        state = self._state
        if state.is_behind:
            await turn()
        while True:
            if (state.news or not state.num_open) and (deltas := state.take()):
                return deltas
            if state.error is not None:
                raise copy(state.error)
            if not state.num_open:
                raise StopAsyncIteration
            await state.wait()

    async def follow(self, sink: Callable[[Delta], bool]) -> None:
        """Pass each Delta to `sink` as it arrives, without waking a task, which would take half of a token's time.

        For a request with one child, between two steps of its iteration. Returns when the sink has returned False, or when the
        iteration must continue: for the end, a failure, or more than one turn's tokens. Raises the sink's errors.
        """
        state = self._state
        assert len(state.sequences) == 1
        if state.news or not state.num_open:
            return
        state.sink = sink
        try:
            await state.wait()
        finally:
            state.sink = None

    async def collect(self) -> list[Delta]:
        """Wait for the end and return one merged Delta per child, by index; cheaper than iterating."""
        state = self._state
        while state.num_open:
            state.news = True  # so that only the end wakes us
            await state.wait()
        if state.error is not None:
            raise copy(state.error)  # a copy, as the raised exception would make a reference cycle
        return await state.take_all()

    @property
    def items(self) -> Sequence[PlacedItem]:
        """The prompt's media."""
        return self._state.items

    def cancel(self) -> None:
        """Abort the request. Idempotent, never blocks, no error after the end. Unfinished children end with "abort"."""
        if self._state.num_open:
            self._cancel(self._state.id)

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and state.num_open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, state.id)
