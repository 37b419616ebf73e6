"""Acceptance: how likely drafts are there and right, learnt from the steps that verified some. No I/O.

    of all rows, by place     the chance that a row has a draft there; and that it is right, if those before it are
    of a row, by place        the same of its own last drafts, and of so many drafts of all rows more as rows are alike
    survival                  the chance that a draft and all before it are right: the product up to its place

`worth` counts the drafts of a step's rows by survival, in bins: so many drafts, of the greatest survival, give so many tokens.
The device shares drafts out alike, by what it learns from the same results (kernels/step/survival.py), so nothing need be sent.
Its running means are of 8 drafts a row and place: good enough to order rows, but a poor forecast. Simulated steps with a number
of drafts chosen by the device's histogram gave 0.90 to 0.99 of the best fixed window's tokens a second where all rows are
alike, and those chosen by `worth` 0.98 to 1.05 (benchmarks/LOG.md).
Owned by Verification.
"""

import numpy as np

from quire.enginecore.scheduling.sequence import Slots
from quire.ipc.step.sections import MAX_DRAFTS

MEMORY_STEPS = 2  # what is learnt of all rows is of as many steps at least
MEMORY_DRAFTS = 16  # of a row and place
ALIKE = (4.0, 200.0)  # drafts of all rows that are counted as those of each, at least and at most
KNOWN_ROWS, KNOWN_DRAFTS = 4, 4  # at least, to tell how alike rows are
AT_FIRST, WEIGHT_AT_FIRST = 0.7, 0.25  # a draft's chance to be right as long as nothing is known, as so many drafts
BINS, BINS_OF_HALF = 32, 4  # of survival, four from 1 to 1/2
NEAR = 0.8  # drafts of this survival, of the least that was verified, may have been left out


class Acceptance:
    """are_made: a model drafts for every row, so one without any drafts is only not read whole yet."""

    def __init__(self, slots: Slots, are_made: bool = False) -> None:
        self._slots, self._are_made, n = slots, are_made, len(slots.key)
        # By place, in rows: that may have had a draft there, that had one, that reached it, in which it was right.
        self._asked, self._drafted, self._reached, self._right = np.zeros((4, MAX_DRAFTS))
        # By slot and place: drafts that were reached, and that were right, of the sequence with this key.
        self._of_rows = np.zeros((2, n, MAX_DRAFTS), np.float32)
        self._keys = np.full(n, -1, np.int64)

    @property
    def num_reached(self) -> float:
        """Rows of which a first draft was verified, as far as they are remembered."""
        return float(self._reached[0])

    def observe(
        self, slots: np.ndarray, windows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, most: int, memory: int
    ) -> None:
        """A step with drafts has returned. int [rows]: the most tokens of each, its drafts, and how many of them were right.

        most: of the drafts of all rows. If there are as many, rows with drafts of little survival may have had more.
        memory: how many rows are to be remembered of all."""
        places = np.arange(MAX_DRAFTS)
        had = drafted[:, None] > places
        reached = had & (accepted[:, None] >= places)
        right = accepted[:, None] > places
        asked = (windows[:, None] - 1 > places) & (had[:, :1] if self._are_made else True)
        survival = self._survival(slots)
        if drafted.sum() >= most:
            asked &= had | (NEAR * survival > survival[had].min(initial=1.0))
        memory = max(memory, MEMORY_STEPS * int((windows > 1).sum()))
        for counts, seen in (
            ((self._asked, self._drafted), (asked, asked & had)),
            ((self._reached, self._right), (reached, right)),
        ):
            for count, of_rows in zip(counts, seen, strict=True):
                count += of_rows.sum(0)
            scale = np.minimum(memory / np.maximum(counts[0], 1), 1.0)
            for count in counts:
                count *= scale
        own = self._of_rows[:, slots] + np.stack([reached, right])
        self._of_rows[:, slots] = own * np.minimum(MEMORY_DRAFTS / np.maximum(own[0], 1), 1.0)

    def worth(self, slots: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """For rows that have at most 1 to `most` drafts each: how many drafts there will be down to each bin of survival, and
        how many of them will be accepted. float [most, 1 + BINS] each, rising from 0."""
        survival = self._survival(slots)[:, :most]
        bins = np.minimum(-BINS_OF_HALF * np.log2(survival), BINS - 1).astype(np.int64)
        at = (bins + BINS * np.arange(most)).ravel()
        have, size = np.broadcast_to(self._have_draft()[:most], survival.shape), most * BINS
        offered = np.bincount(at, have.ravel(), size)
        right = np.bincount(at, (have * survival).ravel(), size)
        totals = np.zeros((2, most, 1 + BINS))
        totals[:, :, 1:] = np.stack([offered, right]).reshape(2, most, BINS).cumsum(1).cumsum(2)
        return totals[0], totals[1]

    def _have_draft(self) -> np.ndarray:
        """The chance that a row has a draft at each place."""
        return np.minimum.accumulate((self._drafted + 1) / (self._asked + 1))

    def _is_right(self) -> np.ndarray:
        """The chance that a draft at each place is right, if those before it are."""
        chances, before, weight = list[float](), AT_FIRST, WEIGHT_AT_FIRST
        for right, reached in zip(self._right.tolist(), self._reached.tolist(), strict=True):
            before = (right + weight * before) / (reached + weight)
            chances.append(before)
            weight = 1.0
        return np.array(chances)

    def _survival(self, slots: np.ndarray) -> np.ndarray:
        """[rows, MAX_DRAFTS]"""
        new = slots[self._keys[slots] != self._slots.key[slots]]
        if len(new):
            self._of_rows[:, new], self._keys[new] = 0.0, self._slots.key[new]
        reached, right = self._of_rows[:, slots]
        alike = _alike(reached[:, 0], right[:, 0])
        survival: np.ndarray = np.cumprod((right + alike * self._is_right()) / (reached + alike), axis=1)
        return np.maximum(survival, 1e-9)


def _alike(reached: np.ndarray, right: np.ndarray) -> float:
    """How many drafts of all rows tell as much of a row as one of its own, by how much rows differ beyond chance."""
    known = reached >= KNOWN_DRAFTS
    if known.sum() < KNOWN_ROWS:
        return ALIKE[1]
    reached, right = reached[known], right[known]
    mean = right.sum() / reached.sum()
    chance = mean * (1 - mean)
    differ = np.var(right / reached) - chance * np.mean(1 / reached)
    return float(np.clip(chance / differ - 1, *ALIKE)) if differ > 0 else ALIKE[1]
