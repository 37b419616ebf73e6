"""StoppedFor: for how long others have been stopped by a signal (SIGSTOP), or by a debugger, as seen by who looks again and
again. Who is slow runs, and may be as slow as it likes; who is stopped does nothing until it is told to go on.

Used where nothing else would end the wait: of the launcher for an engine that starts, of `quire host` for its agent, and by the
core for workers that start or have nothing to do.
"""

import time
from collections.abc import Callable

from quire.ipc.process.loop_clock import LoopClock


class StoppedFor:
    """A look at least every MAX_TICK_S (loop_clock.py): what lies between two counts for no more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = LoopClock(clock)
        self._since: float | None = None

    def seconds(self, is_stopped: bool) -> float:
        """A look. Since which of them in a row somebody is stopped; 0 if nobody is."""
        now = self._clock.tick()
        if not is_stopped:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since
