"""StepTimes: how long steps take, learnt from steps. No I/O.

    a step       by its tokens, and whether rows have windows. Steps are padded, so times go by sizes. A size that was never met
                 is guessed from those around it: a little above the next smaller one, so that it is met where it may pay
    its drafts   what a model takes to make them behind the step before, by their depth and the rows. It is learnt from steps
                 without windows, and taken off from those with windows; other depths lie on a line with two that are known

Only steps without prompts are learnt from. Told of each step by Requests, asked by Verification.
"""

import bisect
import itertools

SIZES = [1, 2, 3, *(n << shift for shift in range(14) for n in (4, 6))]  # a step of n tokens counts as the next larger size
TRUSTED = 3  # steps of a size: the first one may have been captured just then
KEPT = 0.1  # of each further step
OUTLIER = 2.0  # a step counts as at most so many times what was learnt
GUESS = 0.02  # more time for a size that is twice as large, as long as nothing is known
LEAST = 0.1  # of a step's time, that is not of its drafts


class Learnt:
    """Seconds by key: the least of the first TRUSTED ones, and then a running mean."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], tuple[int, float]] = {}  # (how many, seconds)

    def add(self, key: tuple[int, int], seconds: float) -> None:
        count, before = self._seconds.get(key, (0, seconds))
        if count < TRUSTED:
            now = min(before, seconds)
        else:
            now = before + KEPT * (min(seconds, OUTLIER * before) - before)
        self._seconds[key] = min(count + 1, TRUSTED), now

    def get(self, first: int, second: int) -> float | None:
        count, seconds = self._seconds.get((first, second), (0, 0.0))
        return seconds if count == TRUSTED else None

    def trusted(self) -> list[tuple[int, int]]:
        """The keys of which enough is known."""
        return [key for key, (count, _) in self._seconds.items() if count == TRUSTED]


class StepTimes:
    def __init__(self) -> None:
        self._steps = Learnt()  # by (windows, index of the size)
        self._drafts = Learnt()  # by (index of the rows, depth)

    def learn(self, num_tokens: int, windows: bool, seconds: float, depth: int = 0, num_rows: int = 1) -> None:
        """A step without prompts has taken so long. depth: of the drafts that a model made of each row before it."""
        at = index_of(num_tokens)
        if windows or not depth:
            self._steps.add((windows, at), max(seconds - self.of_drafts(depth, num_rows), LEAST * seconds))
        elif (alone := self._find(False, at)) is not None:
            self._drafts.add((index_of(num_rows), depth), max(seconds - alone, 0.0))

    def knows_step(self, num_tokens: int) -> bool:
        """Whether steps of so many tokens were met, without windows and without drafts before them."""
        return self._find(False, index_of(num_tokens)) is not None

    def knows_drafts(self, depth: int) -> bool:
        """Whether drafts of this depth were made before steps without windows, of any rows."""
        return any(known == depth for _, known in self._drafts.trusted())

    # --------------------------------------------------------------------------------------------------------- drafts
    def of_drafts(self, depth: int, num_rows: int) -> float:
        """The time that so many drafts of each row take; 0.0 while it is not known."""
        return self.of_depths([depth], num_rows)[0] if depth else 0.0

    def of_depths(self, depths: list[int], num_rows: int) -> list[float]:
        """The same of several depths, above 0."""
        known = self._drafts.trusted()
        if not known:
            return [0.0] * len(depths)
        at = index_of(num_rows)
        nearest = min((abs(rows - at), rows) for rows, _ in known)[1]
        places = sorted(depth for rows, depth in known if rows == nearest)
        seconds = list(itertools.accumulate((self._drafts.get(nearest, depth) or 0.0 for depth in places), max))
        if len(places) == 1:
            return [seconds[0] * depth / places[0] for depth in depths]
        found = []
        for depth in depths:
            i = min(max(bisect.bisect_left(places, depth), 1), len(places) - 1)
            slope = (seconds[i] - seconds[i - 1]) / (places[i] - places[i - 1])
            found.append(max(seconds[i] + slope * (depth - places[i]), 0.0))
        return found

    # ---------------------------------------------------------------------------------------------------------- steps
    def seconds(self, num_tokens: int, windows: bool) -> float:
        """Time of a step of so many tokens, without drafts before it; in units of any length while nothing is known."""
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
        return self._steps.get(windows, at)

    def _of(self, windows: bool, at: int) -> float | None:
        """The same, or without windows, which takes no longer."""
        found = self._find(windows, at)
        return found if found is not None else self._find(False, at)


def index_of(num_tokens: int) -> int:
    """The index of the size that a step of so many tokens counts as."""
    return min(bisect.bisect_left(SIZES, num_tokens), len(SIZES) - 1)
