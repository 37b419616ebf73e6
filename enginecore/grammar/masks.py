"""StepMasks: which rows of steps in flight still wait for their grammar masks, and since when. No I/O.

A worker waits for masks until it is told that none come, so the core keeps the time. A row with a `late` mask is dropped from
its step, because the other rows wait with it (grammar/deferred.py). Rows that are `overdue` are given up: only their requests
end, when the step returns. Owned by the core's loop, which tells the workers what these methods return.
"""

import numpy as np

MASKS_LATE_S = 0.1  # normally a mask takes microseconds
MASK_TIMEOUT_S = 5.0


class StepMasks:
    def __init__(self, step_timeout_s: float) -> None:
        """step_timeout_s: of a whole step. Masks are given up well before it: a missing one must not get workers replaced."""
        self._step_timeout_s = step_timeout_s
        self._due: dict[int, tuple[set[int], float]] = {}  # step -> its rows without a mask, and since when they wait

    def __bool__(self) -> bool:
        """Whether some step waits. The next plan must not be sent then: it would tell the workers that no more masks come."""
        return bool(self._due)

    def expect(self, step: int, rows: np.ndarray, now: float) -> None:
        """The plan of a step with these mask rows was sent."""
        self._due[step] = (set(rows.tolist()), now)

    @property
    def _timeout_s(self) -> float:
        return min(MASK_TIMEOUT_S, self._step_timeout_s / 2)

    def send(self, step: int, rows: np.ndarray) -> bool:
        """Count masks for these rows as sent, and return True, if all of the rows still wait; else return False."""
        due, _ = self._due.get(step, (set(), 0.0))
        named = set(rows.tolist())
        if not named <= due:
            return False
        due -= named
        if not due:
            self._due.pop(step, None)
        return True

    def due(self, step: int) -> set[int]:
        """The rows of this step that wait."""
        return self._due[step][0] if step in self._due else set()

    def postpone(self, step: int, now: float) -> None:
        """Count this step's waiting from now on: its masks could not be made before."""
        if step in self._due:
            self._due[step] = (self._due[step][0], now)

    def late(self, now: float) -> list[tuple[int, list[int]]]:
        """Rows that have waited for MASKS_LATE_S, as (step, rows)."""
        late_s = min(MASKS_LATE_S, self._timeout_s)
        return [(step, sorted(rows)) for step, (rows, since) in self._due.items() if now >= since + late_s]

    def overdue(self, now: float) -> list[tuple[int, np.ndarray]]:
        """Give up rows that have waited for too long; returns them as (step, rows)."""
        late = [(step, rows) for step, (rows, since) in self._due.items() if now >= since + self._timeout_s]
        for step, _ in late:
            del self._due[step]
        return [(step, np.asarray(sorted(rows), np.int32)) for step, rows in late]

    def clear(self) -> None:
        """Forget all steps: they are lost."""
        self._due.clear()
