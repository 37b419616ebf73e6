"""The garbage collector of a frontend process: when it may look at everything that lives.

A full collection looks at each object of each connection: 100 ms at 2,000 streams, in which nobody is served. What requests
leave is freed without it, as nothing of a request or a connection refers to itself when it ends. So full collections wait for a
quiet moment, or for an hour without one; young objects are looked at as ever, a few thousand at a time.
"""

import gc
import time
from collections.abc import Callable

IDLE_EVERY_S = 60.0
BUSY_EVERY_S = 3600.0


class GarbageCollection:
    """Made when start-up is done: what start-up made stays, and is never looked at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 1 << 30)

    def look(self, is_idle: bool) -> bool:
        """Called now and then; whether everything was looked at."""
        if self._clock() - self._last < (IDLE_EVERY_S if is_idle else BUSY_EVERY_S):
            return False
        gc.collect()
        self._last = self._clock()
        return True
