"""PreparingRequests: requests that were accepted and cannot run yet, because something that they need is still being made.

A preparer looks at each request that intake has accepted, and returns a Future if the request must wait: for the work of a
thread, or for an event. Only this request waits; all others go to the scheduler at once. When it is ready it follows, and its
place in the queue is that of its arrival. A preparer puts its results into the sequences, which no other part reads before.

It owns which requests prepare, until when, and the descriptor that wakes the core's loop when one is ready. It has no threads
(a preparer has its own executor), and no sequences that run (scheduler.py). Owned by the core's loop.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future

from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages.frontend import AddRequest, ErrorCode
from quire.ipc.process.loop_clock import LoopClock

log = logging.getLogger("quire.enginecore")

TIMEOUT_S = 60.0

# (request, its sequences) -> a Future to wait for, or None. Called in the core's thread: anything slow belongs to the Future.
Preparer = Callable[[AddRequest, list[Sequence]], Future[None] | None]
Failure = tuple[ErrorCode, str]  # RequestError's code and text


class PreparationFailed(Exception):
    """A request cannot be prepared; the text is for its user. Raised by a preparer, or set as its Future's exception."""

    def __init__(self, text: str, code: ErrorCode = "invalid") -> None:
        super().__init__(text)
        self.code: ErrorCode = code


class PreparingRequest:
    """One request and the Futures that it waits for. failure: why it cannot run, once that is known."""

    __slots__ = ("deadline", "failure", "futures", "id", "owner", "sequences")

    def __init__(
        self, owner: int, request_id: int, sequences: list[Sequence], futures: list[Future[None]], deadline: float
    ) -> None:
        self.owner = owner
        self.id = request_id
        self.sequences = sequences
        self.futures = futures
        self.deadline = deadline
        self.failure: Failure | None = None

    def has_ended(self) -> bool:
        """Whether everything is ready, or something has failed; `failure` is set then."""
        done = [future for future in self.futures if future.done()]
        self.failure = next(filter(None, map(self._failure_of, done)), None)
        return self.failure is not None or len(done) == len(self.futures)

    def _failure_of(self, future: Future[None]) -> Failure | None:
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            return None
        if isinstance(error, PreparationFailed):
            return error.code, str(error)
        log.error("request %d cannot be prepared", self.id, exc_info=error)
        return "engine_error", "the engine failed to prepare this request"

    def cancel(self) -> None:
        """Cancel work that has not begun. Work that has begun goes on, and its result is ignored."""
        for future in self.futures:
            future.cancel()


_NOBODY = PreparingRequest(-1, -1, [], [], 0.0)


class PreparingRequests:
    """Called in the core's thread; only Futures may end in others. timeout_s: after this a request fails. It is measured by a
    LoopClock, so that no request fails because the process was stopped for a while."""

    def __init__(
        self, preparers: Iterable[Preparer] = (), timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._preparers = tuple(preparers)
        self._when_closed: list[Callable[[], None]] = []
        self._timeout_s = timeout_s
        self._requests: dict[tuple[int, int], PreparingRequest] = {}  # (owner, request id), by arrival and so by deadline
        self.num_sequences = 0
        self._clock = LoopClock(clock)
        self._lock = threading.Lock()  # protects the next two: the descriptor is readable while the list is not empty
        self._woken: list[PreparingRequest | Callable[[], None]] = []  # their Future has ended; any thread adds
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For a poller: readable when `take_ended` has something."""
        return self._wake_fd

    def add(self, preparer: Preparer, close: Callable[[], None]) -> None:
        """One more preparer; `close` ends what it owns."""
        self._preparers = (*self._preparers, preparer)
        self._when_closed.append(close)

    def later(self, call: Callable[[], None]) -> None:
        """Let the next `take_ended` call this, in the core's thread. For any thread."""
        self._wake(call)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(owner, request id) of each."""
        return iter(self._requests)

    def has_request(self, owner: int, request_id: int) -> bool:
        return (owner, request_id) in self._requests

    def sequences(self) -> Iterator[Sequence]:
        """Those of all requests."""
        return (seq for request in self._requests.values() for seq in request.sequences)

    def start(self, owner: int, request: AddRequest, sequences: list[Sequence]) -> bool:
        """Whether the request has to wait. Then it is kept here until `take_ended` returns it, or it is dropped."""
        if not self._preparers:
            return False
        futures = [f for prepare in self._preparers if (f := _started(prepare, request, sequences)) is not None]
        if not futures:
            return False
        self._clock.tick()
        new = PreparingRequest(owner, request.id, sequences, futures, self._clock.now + self._timeout_s)
        self._requests[owner, request.id] = new
        self.num_sequences += len(sequences)
        for seq in sequences:
            if seq.tenant is not None:
                seq.tenant.add_waiting(seq.prompt_cost, seq.prompt_cost + seq.expected_output)
        for future in futures:
            future.add_done_callback(lambda _: self._wake(new))
        return True

    def look_again(self) -> None:
        """Let the loop come back at once, without waiting for an event."""
        self._wake(_NOBODY)

    def _wake(self, request: PreparingRequest | Callable[[], None]) -> None:
        with self._lock:
            self._woken.append(request)
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------------------------------------------ the end
    def take_ended(self) -> list[PreparingRequest]:
        """Remove and return the requests that are ready or have failed. Call it in each turn."""
        if not self._requests and not self._woken:
            return []
        self._clock.tick()
        ended = []
        for request in self._take_woken():
            if not isinstance(request, PreparingRequest):
                request()
            elif self._requests.get((request.owner, request.id)) is request and request.has_ended():
                ended.append(self._remove(request))
        for request in list(self._overdue()):
            request.failure = ("overloaded", f"what the request needs was not ready within {self._timeout_s:g} s")
            ended.append(self._remove(request))
        return ended

    def _take_woken(self) -> list[PreparingRequest | Callable[[], None]]:
        with self._lock:
            woken, self._woken = self._woken, []
            if woken and self._wake_fd >= 0:
                os.eventfd_read(self._wake_fd)
        return woken

    def _overdue(self) -> Iterator[PreparingRequest]:
        for request in self._requests.values():
            if self._clock.now < request.deadline:
                return
            yield request

    def abort(self, owner: int, request_id: int) -> int:
        """Drop a request; returns how many sequences it had, 0 if there is none."""
        request = self._requests.get((owner, request_id))
        return len(self._remove(request).sequences) if request is not None else 0

    def abort_owner(self, owner: int) -> int:
        """Drop all of a frontend's requests; returns how many sequences they had."""
        return sum(self.abort(o, r) for o, r in list(self._requests) if o == owner)

    def finish(self, owner: int, key: int) -> None:
        """Drop one sequence, and with the last one its request."""
        request = self._requests.get((owner, key >> 8))
        left = [seq for seq in request.sequences if seq.key != key] if request is not None else []
        if request is None or len(left) == len(request.sequences):
            return
        if not left:
            self._remove(request)
            return
        self.num_sequences -= 1
        _wait_no_more(seq for seq in request.sequences if seq.key == key)
        request.sequences = left

    def _remove(self, request: PreparingRequest) -> PreparingRequest:
        del self._requests[request.owner, request.id]
        self.num_sequences -= len(request.sequences)
        _wait_no_more(request.sequences)
        request.cancel()
        return request

    def close(self) -> None:
        """Drop all requests. May be called again."""
        for request in list(self._requests.values()):
            self._remove(request)
        while self._when_closed:
            self._when_closed.pop()()
        with self._lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            if wake_fd >= 0:
                os.close(wake_fd)

    def check(self) -> None:
        """Assert that each request is here once, by arrival, and has something to wait for and sequences that do not run."""
        requests = list(self._requests.items())
        assert all((r.owner, r.id) == name and r.futures and r.sequences for name, r in requests)
        assert all(seq.request_id == r.id and seq.owner == r.owner and seq.slot < 0 for _, r in requests for seq in r.sequences)
        assert self.num_sequences == sum(len(r.sequences) for _, r in requests)
        assert [r.deadline for _, r in requests] == sorted(r.deadline for _, r in requests)


def _wait_no_more(sequences: Iterable[Sequence]) -> None:
    """They leave what their tenants have waiting; the scheduler counts those that go on to it."""
    for seq in sequences:
        if seq.tenant is not None:
            seq.tenant.remove_waiting(seq.prompt_cost, seq.prompt_cost + seq.expected_output)


def _started(prepare: Preparer, request: AddRequest, sequences: list[Sequence]) -> Future[None] | None:
    try:
        return prepare(request, sequences)
    except BaseException as error:  # any error fails only this request, and is logged unless its text is for the user
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed
