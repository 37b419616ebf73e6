"""StepMasks: which rows of steps in flight still wait for their grammar masks, and since when. No I/O.

A worker waits for masks until it is told that none come, so it is the core that keeps the time. A row that is `late` is left
out of its step, for the others wait with it (grammar/held.py); what is `overdue` is given up, which ends those rows' requests
when the step returns, and nothing else. Owned by the core's loop, which sends what it names.
"""

import numpy as np

MASKS_LATE_S = 0.1  # a grammar takes microseconds for a mask
MASK_TIMEOUT_S = 5.0


class StepMasks:
    def __init__(self, step_timeout_s: float) -> None:
        """step_timeout_s: of a whole step; masks are given up well before, for they must not cost a worker."""
        self._step_timeout_s = step_timeout_s
        self._due: dict[int, tuple[set[int], float]] = {}  # step -> its rows without mask, since when they wait

    def __bool__(self) -> bool:
        """Whether some step waits: the next plan must not be sent, for it would end the waiting."""
        return bool(self._due)

    def expect(self, step: int, rows: np.ndarray, now: float) -> None:
        """The plan of a step with these mask rows was sent."""
        self._due[step] = (set(rows.tolist()), now)

    @property
    def _timeout_s(self) -> float:
        return min(MASK_TIMEOUT_S, self._step_timeout_s / 2)

    def send(self, step: int, rows: np.ndarray) -> bool:
        """Whether masks for these rows are still wanted, all of them; then they count as sent."""
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
        """What this step waits for can only be made from now on."""
        if step in self._due:
            self._due[step] = (self._due[step][0], now)

    def late(self, now: float) -> list[tuple[int, list[int]]]:
        """(step, rows) that have waited for long."""
        late_s = min(MASKS_LATE_S, self._timeout_s)
        return [(step, sorted(rows)) for step, (rows, since) in self._due.items() if now >= since + late_s]

    def overdue(self, now: float) -> list[tuple[int, np.ndarray]]:
        """(step, rows) that are given up now."""
        late = [(step, rows) for step, (rows, since) in self._due.items() if now >= since + self._timeout_s]
        for step, _ in late:
            del self._due[step]
        return [(step, np.asarray(sorted(rows), np.int32)) for step, rows in late]

    def clear(self) -> None:
        """The steps are lost."""
        self._due.clear()
