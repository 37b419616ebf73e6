"""Verification: how many drafts a step verifies, so that most tokens a second are expected. No I/O.

    expected tokens     one a row, and the drafts that will be accepted. A row has a draft at a place if the drafter goes so
                        far, and it is accepted if it and all before it are right: both are learnt by place, over all rows
    expected seconds    of a step of as many tokens (step_times.py), so weights, context and experts price themselves
    the choice          among as many drafts as make a step of each size. The device gives them to the rows where they are
                        accepted most likely (kernels/step/survival.py); here all rows count alike, so it does no worse

Where no number of drafts pays, only one step in TRY_EVERY verifies some: one of each of TRY_ROWS rows. Where some number pays,
one step in TRY_EVERY has none, or the next larger or smaller number, since times change with the context. Owned by Windows.
"""

import numpy as np

from quire.enginecore.scheduling.step_times import SIZES, StepTimes, index_of
from quire.ipc.step.sections import MAX_DRAFTS

TRY_EVERY = 64  # steps
TRY_ROWS = 8
CHOOSE_EVERY = 4  # steps: a choice takes 40 us
LEAST_GAIN = 0.02  # of tokens a second, for drafts to be verified at all
MEMORY_ROWS, MEMORY_STEPS = 64, 2  # what is learnt is of as many rows and steps, whichever are more
AT_FIRST = 0.7  # a draft's chance to be right as long as nothing is known


class Verification:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        # by place, in rows: that may have had a draft there, that had one, that reached it, in which it was right
        self._asked, self._drafted, self._reached, self._right = np.zeros((4, MAX_DRAFTS))
        self._steps = 0
        self._chosen = (0, 0, 0, 0)  # for rows, most drafts of a row, and of all: draft tokens
        self.tries = False  # the step that was last asked for only tries

    def draft_tokens(self, num_rows: int, most: int, room: int) -> int:
        """How many drafts the next step of so many decode rows should have. most: of one row. room: of all."""
        self._steps += 1
        self.tries = False
        room = min(room, num_rows * most)
        if room <= 0:
            return 0
        if self._chosen[:3] != (num_rows, most, room) or self._steps % CHOOSE_EVERY == 0:
            self._chosen = num_rows, most, room, self._choose(num_rows, most, room)
        chosen = self._chosen[3]
        turn, is_other = divmod(self._steps, TRY_EVERY)
        if is_other:
            return chosen
        if not chosen:
            self.tries = True
            return min(num_rows, TRY_ROWS)
        numbers = self._numbers(num_rows, room)
        at = numbers.index(chosen)
        return (0, numbers[min(at + 1, len(numbers) - 1)], numbers[max(at - 1, 0)])[turn % 3]

    @property
    def pays(self) -> bool:
        """Whether the step that was last asked for should have drafts, a try or not; so it is said until one was asked for."""
        return self._steps == 0 or self._chosen[3] > 0

    def rests(self, steps: int) -> bool:
        """Whether none of so many steps behind the one that was last asked for will verify any drafts."""
        return not self.pays and not self.tries_within(steps)

    def tries_within(self, steps: int) -> bool:
        """Whether one of so many steps behind the one that was last asked for verifies another number than the chosen one."""
        return 0 < -self._steps % TRY_EVERY <= steps

    def window(self, num_rows: int, draft_tokens: int, most: int) -> int:
        """Most tokens of a row if so many drafts are shared out."""
        offered = num_rows * self._have_draft()[:most].cumsum()
        return 2 + int(np.searchsorted(offered[: most - 1], draft_tokens)) if draft_tokens else 1

    def observe(self, windows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, most: int) -> None:
        """A step with drafts has returned. int [rows]: the most tokens of each, its drafts, and how many of them were right.

        most: of the drafts of all rows. If there are as many, some rows may have had more."""
        places = np.arange(MAX_DRAFTS)
        had = drafted[:, None] > places
        reached = had & (accepted[:, None] >= places)
        known = drafted.max(initial=0) - 1 if drafted.sum() >= most else MAX_DRAFTS
        asked = (windows[:, None] - 1 > places) & (places < known)
        memory = max(MEMORY_ROWS, MEMORY_STEPS * len(drafted))
        for counts, seen in (
            ((self._asked, self._drafted), (asked, asked & had)),
            ((self._reached, self._right), (reached, accepted[:, None] > places)),
        ):
            for count, of_rows in zip(counts, seen, strict=True):
                count += of_rows.sum(0)
            scale = np.minimum(memory / np.maximum(counts[0], 1), 1.0)
            for count in counts:
                count *= scale

    # ------------------------------------------------------------------------------------------------------ the choice
    def _have_draft(self) -> np.ndarray:
        """The chance that a row has a draft at each place."""
        return np.minimum.accumulate((self._drafted + 1) / (self._asked + 1))

    def _is_right(self) -> np.ndarray:
        """The chance that the drafts up to each place are all right, if they are there."""
        chances, before = np.ones(MAX_DRAFTS), AT_FIRST
        for place in range(MAX_DRAFTS):
            before = chances[place] = (self._right[place] + before) / (self._reached[place] + 1)
        return np.cumprod(chances)

    def _numbers(self, num_rows: int, room: int) -> list[int]:
        """Numbers of drafts to choose among: none, and those that make a step of each size."""
        sizes = SIZES[index_of(num_rows) : index_of(num_rows + room) + 1]
        return [0, *(min(size - num_rows, room) for size in sizes if size > num_rows)]

    def _choose(self, num_rows: int, most: int, room: int) -> int:
        numbers = self._numbers(num_rows, room)
        have = self._have_draft()[:most]
        offered = np.concatenate([[0.0], num_rows * have.cumsum()])  # drafts up to each place
        right = np.concatenate([[0.0], num_rows * (have * self._is_right()[:most]).cumsum()])
        tokens = num_rows + np.interp(numbers, offered, right)
        seconds = [self._times.seconds(num_rows + number, number > 0) for number in numbers]
        rates = tokens / np.asarray(seconds)
        best = int(rates.argmax())
        return numbers[best] if rates[best] > (1 + LEAST_GAIN) * rates[0] else 0
