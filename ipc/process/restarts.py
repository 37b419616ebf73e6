"""Restarts: decides when to start a process again after its end, and when to give up. It starts nothing and reads no clock.

A process that has served a request is started again at once. Otherwise the pause before a start doubles each time; after a
process that has lived well it is the shortest again. A start that a signal from outside ended is no failure, and is repeated at
once; but where there are many in a row, memory may be short each time, and they count. Restarting is given up after a number of
starts in a row that did not become ready, or of short lives in a row without a served request: then the parent of this process
starts everything anew, or alerts an operator. Used by `quire serve` for the engine and for its frontends
(frontend/supervisor.py), by `quire host` for its agent, and by the core for its workers (enginecore/worker_supervisor.py).
"""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
LIVED_WELL_S = 120.0
MAX_FAILED_STARTS = 4  # within 7 or 15 s, depending on the first pause: a dead process's GPU memory may be freed as late
MAX_SHORT_LIVES = 8  # within a minute of pauses and the time of the starts
MAX_KILLED_STARTS = 8  # in a row, by signals from outside; later ones are failed starts
# A restart takes as long as the start before it, or less: files are in the page cache and kernels are compiled. But files may
# have to be fetched again, and a first start, which has no limit, may have been quick: hence the large factor.
START_LIMIT_S, START_LIMIT_FACTOR = 300.0, 10.0


def restart_limit_s(start_s: float, least_s: float = START_LIMIT_S) -> float:
    """Most seconds of a restart before it counts as hung. start_s: duration of the last start that succeeded."""
    return max(least_s, START_LIMIT_FACTOR * start_s)


class Restarts:
    """The starts of one process, or of a group that lives and dies together. Times are seconds of the caller's clock."""

    def __init__(
        self,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        lived_well_s: float = LIVED_WELL_S,
        max_failed_starts: int | None = MAX_FAILED_STARTS,
        max_short_lives: int | None = MAX_SHORT_LIVES,
    ) -> None:
        """first_pause_s 0: the first restart comes at once, and pauses grow from FIRST_PAUSE_S. A maximum of None: no limit."""
        self._first_pause_s = first_pause_s
        self._lived_well_s = lived_well_s
        self._max_failed_starts = max_failed_starts
        self._max_short_lives = max_short_lives
        self._pause_s = first_pause_s
        self._failed_starts = self._short_lives = self._killed_starts = 0
        self._ready_at: float | None = None
        self._has_served = False

    def ready(self, now: float) -> None:
        """A start has succeeded."""
        self._ready_at, self._failed_starts, self._killed_starts = now, 0, 0

    def served(self) -> None:
        """The process that is ready has served a request: the start was no failure, however soon it ends."""
        self._has_served = True

    def ended(self, now: float, from_outside: bool = False) -> float | None:
        """The process has ended, ready or not; returns the seconds until the next start, or None to give up. from_outside: by a
        signal that it did not cause."""
        has_served, self._has_served = self._has_served, False
        if self._ready_at is None and not has_served and from_outside and self._killed_starts < MAX_KILLED_STARTS:
            self._killed_starts += 1
            return 0.0
        if has_served:
            self._short_lives, self._failed_starts, self._killed_starts, self._ready_at = 0, 0, 0, None
            self._pause_s = self._first_pause_s or FIRST_PAUSE_S
            return 0.0
        if self._ready_at is None:
            self._failed_starts += 1
        elif now - self._ready_at >= self._lived_well_s:
            self._pause_s, self._short_lives = self._first_pause_s, 0
        else:
            self._short_lives += 1
        self._ready_at = None
        if _reached(self._failed_starts, self._max_failed_starts) or _reached(self._short_lives, self._max_short_lives):
            return None
        pause_s = self._pause_s
        self._pause_s = min(max(2 * pause_s, self._first_pause_s or FIRST_PAUSE_S), MAX_PAUSE_S)
        return pause_s


def _reached(count: int, most: int | None) -> bool:
    return most is not None and count >= most
