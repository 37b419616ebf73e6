"""LoopClock: the time in which a process's loop has run, for its time-outs on the silence of others and on slow work.

A process may stand still with its whole machine (a snapshot, a suspended container). Others were not silent then, and nothing
took long. So the time between two ticks counts as MAX_TICK_S at most. Used by the core's supervisor of workers, by requests
that prepare (enginecore/) and by the link to frontends.
"""

import time
from collections.abc import Callable

MAX_TICK_S = 1.0  # the core's loop waits half a second at most, until the next heartbeat


class LoopClock:
    """now: seconds in which the loop has run, as of the last `tick`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = 0.0
        self._clock = clock
        self._last_tick = clock()

    def tick(self) -> float:
        """Update and return `now`. Call it in each turn of the loop."""
        now = self._clock()
        self.now += min(now - self._last_tick, MAX_TICK_S)
        self._last_tick = now
        return self.now
