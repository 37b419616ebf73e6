"""Cohorts: decode rows dealt into as many parts as a model has stages, so that each stage works on another one's step. No I/O.

A row's next step needs its last token, which the last stage samples: with all rows in every step, one stage would work and the
others wait. A step has the rows of one cohort, prompts beside them; steps go around. A cohort has at most two steps in flight,
as a model in one piece has, so that all have two for each stage. With one stage there is one cohort, whose turn it always is,
and the core alone bounds what is in flight. Owned by DecodeRows (decode.py); the scheduler asks whose turn it is.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

STEPS_OF_COHORT = 2  # in flight
NO_SLOTS = np.zeros(0, np.int32)
ONE = (0,)


class Cohort:
    __slots__ = ("rows", "sent", "steps")

    def __init__(self) -> None:
        self.rows = NO_SLOTS  # slots, in row order
        self.sent: np.ndarray | None = None  # the decode rows that the workers hold
        self.steps: deque[int] = deque()  # in flight, of several cohorts


class Cohorts:
    def __init__(self, count: int) -> None:
        self._all = [Cohort() for _ in range(count)]
        self._turn = 0
        self.are_several = count > 1
        self.now = self._all[0]  # whose turn it is

    def __len__(self) -> int:
        """Rows."""
        return sum(len(cohort.rows) for cohort in self._all) if self.are_several else len(self.now.rows)

    def turns(self, returned: int) -> Iterable[int]:
        """Whose turn it is, one after the other until one has something to do; `returned` is the last step that is back.

        An empty one has its turn, too: with prompts alone, which so follow each other through the stages.
        """
        return self._around(returned) if self.are_several else ONE

    def _around(self, returned: int) -> Iterator[int]:
        first = self._turn + 1
        for turn in range(first, first + len(self._all)):
            number = turn % len(self._all)
            cohort = self._all[number]
            while cohort.steps and cohort.steps[0] <= returned:
                cohort.steps.popleft()
            if len(cohort.steps) < STEPS_OF_COHORT:
                self._turn, self.now = number, cohort
                yield number

    def begin(self, step: int) -> None:
        """A step of the cohort whose turn it is goes to the workers; of several."""
        self.now.steps.append(step)

    def deal(self, slots: np.ndarray) -> None:
        """New rows, whose last token is of the step that is being made.

        They stay in its cohort, but for those that would make it larger than others by an eighth: who goes to another one has
        to wait once until its token is there.
        """
        if not self.are_several:
            self.now.rows = np.concatenate([self.now.rows, slots])
            return
        sizes = [len(cohort.rows) for cohort in self._all]
        dealt: list[list[int]] = [[] for _ in sizes]
        own = self._all.index(self.now)
        for slot in slots.tolist():
            least = min(range(len(sizes)), key=sizes.__getitem__)
            to = least if sizes[own] - sizes[least] > sizes[own] // 8 else own
            sizes[to] += 1
            dealt[to].append(slot)
        for cohort, new in zip(self._all, dealt, strict=True):
            if new:
                cohort.rows = np.concatenate([cohort.rows, np.asarray(new, np.int32)])

    def remove(self, slot: int) -> None:
        """A row, in whichever it is, if it is in one."""
        for cohort in self._all:
            if (others := cohort.rows != slot).all():
                continue
            cohort.rows = cohort.rows[others]

    def forget_sent(self) -> None:
        """The workers hold nothing any more."""
        for cohort in self._all:
            cohort.sent = None

    def check(self) -> set[int]:
        """Assert that a slot is in one of them, once; returns all."""
        rows = [slot for cohort in self._all for slot in cohort.rows.tolist()]
        assert len(set(rows)) == len(rows)
        return set(rows)
