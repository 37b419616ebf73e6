"""StoppedFor: how long other processes have been stopped by a signal (SIGSTOP) or a debugger, as seen by repeated checks.

A slow process still makes progress; a stopped one makes none until it is continued. Used where no other time-out would end the
wait: by the launcher for an engine or a frontend that starts, by `quire host` for its agent, and by the core for workers that
start or have nothing to do.
"""

import time
from collections.abc import Callable

from quire.ipc.process.loop_clock import LoopClock


class StoppedFor:
    """Check at least every MAX_TICK_S (loop_clock.py): the time between two checks counts as no more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = LoopClock(clock)
        self._since: float | None = None

    def seconds(self, is_stopped: bool) -> float:
        """Report a check; returns the seconds since the first check of an unbroken series with a stopped process, or 0."""
        now = self._clock.tick()
        if not is_stopped:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since
