"""StepTimes: how long steps take, learnt from steps, by the number of their tokens and whether rows have windows. No I/O.

Steps are padded, and weights are read once however many tokens a step has, so times go by sizes, and sizes that were never met
are guessed from those around them: a little above the next smaller one, so that they are met where they may pay. Only steps
without prompts are learnt from. Told of each step by Requests, asked by Verification.
"""

import bisect

SIZES = [1, 2, 3, *(n << shift for shift in range(14) for n in (4, 6))]  # a step of n tokens counts as the next larger size
TRUSTED = 3  # steps of a size: the first one may have been captured just then
KEPT = 0.1  # of each further step
OUTLIER = 2.0  # a step counts as at most so many times what was learnt
GUESS = 0.02  # more time for a size that is twice as large, as long as nothing is known


class StepTimes:
    def __init__(self) -> None:
        self._learnt: dict[tuple[bool, int], tuple[int, float]] = {}  # (windows, index of the size) -> (steps, seconds)

    def learn(self, num_tokens: int, windows: bool, seconds: float, draft_depth: int = 0) -> None:
        """A step without prompts has taken so long. draft_depth: of the drafts that a model made before it.

        The time of a step without windows stands for steps without any drafts, so a step behind drafts is left out."""
        if draft_depth and not windows:
            return
        key = windows, index_of(num_tokens)
        count, before = self._learnt.get(key, (0, seconds))
        if count < TRUSTED:
            now = min(before, seconds)
        else:
            now = before + KEPT * (min(seconds, OUTLIER * before) - before)
        self._learnt[key] = min(count + 1, TRUSTED), now

    def seconds(self, num_tokens: int, windows: bool) -> float:
        """Time of a step of so many tokens; in units of any length while nothing is known."""
        at = index_of(num_tokens)
        if (found := self._find(windows, at)) is not None:
            return found
        lower = next((i for i in range(at, -1, -1) if self._of(windows, i) is not None), None)
        upper = next((i for i in range(at, len(SIZES)) if self._find(windows, i) is not None), None)
        if lower is None:
            return self._find(windows, upper) or 1.0 if upper is not None else 1.0 + GUESS * SIZES[at]
        low = self._of(windows, lower) or 1.0
        grown = (SIZES[at] - SIZES[lower]) / SIZES[lower]
        if upper is None:
            return low * (1 + GUESS * grown)
        high = self._find(windows, upper) or 1.0
        return low + (high - low) * (SIZES[at] - SIZES[lower]) / max(SIZES[upper] - SIZES[lower], 1)

    def _find(self, windows: bool, at: int) -> float | None:
        count, seconds = self._learnt.get((windows, at), (0, 0.0))
        return seconds if count == TRUSTED else None

    def _of(self, windows: bool, at: int) -> float | None:
        """The same, or without windows, which takes no longer."""
        found = self._find(windows, at)
        return found if found is not None else self._find(False, at)


def index_of(num_tokens: int) -> int:
    """The index of the size that a step of so many tokens counts as."""
    return min(bisect.bisect_left(SIZES, num_tokens), len(SIZES) - 1)
