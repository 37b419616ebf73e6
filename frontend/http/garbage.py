"""Garbage collection in a frontend process: when a full collection may run.

A full collection visits every object of every connection: 100 ms at 2,000 streams, during which no request is served. Requests
need none: neither a request nor a connection is part of a reference cycle when it ends. So full collections wait for a quiet
moment, or an hour if there is none. Young objects are collected as usual, a few thousand at a time.
"""

import gc
import time
from collections.abc import Callable

IDLE_EVERY_S = 60.0
BUSY_EVERY_S = 3600.0


class GarbageCollection:
    """Made when start-up is done: objects that exist by then are frozen and never visited again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 1 << 30)

    def look(self, is_idle: bool) -> bool:
        """Run a full collection if one is due; returns whether it ran. Called every second."""
        if self._clock() - self._last < (IDLE_EVERY_S if is_idle else BUSY_EVERY_S):
            return False
        gc.collect()
        self._last = self._clock()
        return True
