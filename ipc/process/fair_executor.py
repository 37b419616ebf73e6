"""FairExecutor: runs slow work of many owners in a few threads, so that no owner's work holds up another's for long.

The next job is one of the owner with the fewest that run. An owner's jobs go by arrival, but a large one as if it had come
later, so that small ones overtake it. Where there are several threads, one owner never has all of them. Owners are API keys or
names of keys. Used for grammars (enginecore/grammar/compiler.py) and for chat templates of requests
(frontend/text/request_templates.py), which both wait for a process of their own (asked_child.py).
"""

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

LATER_S_PER_BYTE = 25e-6  # how much later a job of so many bytes seems to have come: a small one takes milliseconds,
MOST_LATER_S = 10.0  # one of 200 kB seconds
LARGE_BYTES = 32 << 10


class Job(NamedTuple):
    owner: str
    num_bytes: int
    work: Callable[[], Any]
    future: "Future[Any]"

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= LARGE_BYTES


class Turns:
    """The order of turns; no threads. num_threads: how many jobs may run at once. leaves_room: one owner never has all of them,
    nor more than half with large jobs; False where jobs are short."""

    def __init__(self, num_threads: int, leaves_room: bool = True) -> None:
        self._most_of_one = max(num_threads - 1, 1) if leaves_room else num_threads
        self._most_large_of_one = max(num_threads // 2, 1) if leaves_room else num_threads
        self._waiting: dict[str, list[tuple[float, int, Job]]] = {}  # a heap for each owner
        self._running: Counter[str] = Counter()
        self._running_large: Counter[str] = Counter()
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, job: Job, now: float) -> None:
        when = now + min(job.num_bytes * LATER_S_PER_BYTE, MOST_LATER_S)
        heapq.heappush(self._waiting.setdefault(job.owner, []), (when, next(self._numbers), job))

    def take(self) -> Job | None:
        """The next job, which counts as running until `ended`; None if none may run now."""
        could = [owner for owner in self._waiting if self._may_run(owner)]
        if not could:
            return None
        owner = min(could, key=lambda name: (self._running[name], self._waiting[name][0]))
        waiting = self._waiting[owner]
        _, _, job = heapq.heappop(waiting)
        if not waiting:
            del self._waiting[owner]
        self._running[owner] += 1
        self._running_large[owner] += job.is_large
        return job

    def _may_run(self, owner: str) -> bool:
        if self._running[owner] >= self._most_of_one:
            return False
        return not self._waiting[owner][0][2].is_large or self._running_large[owner] < self._most_large_of_one

    def ended(self, job: Job) -> None:
        for running, one in ((self._running, 1), (self._running_large, job.is_large)):
            running[job.owner] -= one
            if not running[job.owner]:
                del running[job.owner]


class FairExecutor:
    """threads: num_threads of them, which run other work, too; their owner shuts them down. leaves_room: as for Turns."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        num_threads: int,
        clock: Callable[[], float] = time.monotonic,
        leaves_room: bool = True,
    ) -> None:
        self._threads = threads
        self._turns = Turns(num_threads, leaves_room)
        self._lock = threading.Lock()  # protects the turns
        self._clock = clock

    def submit(self, work: Callable[[], T], owner: str = "", num_bytes: int = 0) -> "Future[T]":
        """num_bytes: of what is worked on. Raises RuntimeError if the threads were shut down."""
        future: Future[T] = Future()
        with self._lock:
            self._turns.add(Job(owner, num_bytes, work, future), self._clock())
        self._threads.submit(self._run)
        return future

    def _run(self) -> None:
        """Run jobs until none may run now: the thread that ends a job of an owner goes on with its next one."""
        while True:
            with self._lock:
                job = self._turns.take()
            if job is None:
                return
            try:
                if job.future.set_running_or_notify_cancel():
                    _run_one(job)
            finally:
                with self._lock:
                    self._turns.ended(job)
                del job  # its future refers to its result


def _run_one(job: Job) -> None:
    try:
        result = job.work()
    except BaseException as error:  # whatever it is, it belongs to who waits for the future
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
