"""Micro-batches: the decode rows, divided by the number of pipeline stages, so that each stage works on another one. No I/O.

A row's next step needs its last token, which the last stage samples: with all rows in every step, one stage would work while
the others wait. A step has the rows of one micro-batch, and prompts beside them; micro-batches take turns. Each has at most two
steps in flight, as a model without stages has, so that there are two for each stage. With one stage there is one micro-batch,
which always has its turn, and only the core limits the steps in flight. Owned by DecodeRows (decode.py); the scheduler asks for
the turn.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

STEPS_OF_MICRO_BATCH = 2  # in flight
NO_SLOTS = np.zeros(0, np.int32)
ONE = (0,)


class MicroBatch:
    __slots__ = ("rows", "sent", "steps")

    def __init__(self) -> None:
        self.rows = NO_SLOTS  # slots, in row order
        self.sent: np.ndarray | None = None  # the decode rows that the workers hold
        self.steps: deque[int] = deque()  # in flight; kept only if there are several micro-batches


class MicroBatches:
    def __init__(self, count: int) -> None:
        self._all = [MicroBatch() for _ in range(count)]
        self._turn = 0
        self.are_several = count > 1
        self.now = self._all[0]  # the one that has its turn

    def __len__(self) -> int:
        """Rows."""
        return sum(len(micro_batch.rows) for micro_batch in self._all) if self.are_several else len(self.now.rows)

    def rows(self) -> list[np.ndarray]:
        """The slots of each micro-batch."""
        return [micro_batch.rows for micro_batch in self._all]

    def turns(self, returned: int) -> Iterable[int]:
        """Numbers of micro-batches in turn, to be read until one has work to do. returned: the last step that is back.

        An empty one has its turn, too: its step has only prompts, which thus follow each other through the stages.
        """
        return self._around(returned) if self.are_several else ONE

    def _around(self, returned: int) -> Iterator[int]:
        first = self._turn + 1
        for turn in range(first, first + len(self._all)):
            number = turn % len(self._all)
            micro_batch = self._all[number]
            while micro_batch.steps and micro_batch.steps[0] <= returned:
                micro_batch.steps.popleft()
            if len(micro_batch.steps) < STEPS_OF_MICRO_BATCH:
                self._turn, self.now = number, micro_batch
                yield number

    def begin(self, step: int) -> None:
        """A step of the micro-batch that has its turn goes to the workers. Only if there are several."""
        self.now.steps.append(step)

    def assign(self, slots: np.ndarray) -> None:
        """Add rows; their last token is sampled in the step that is being made.

        They stay in the micro-batch of that step, except those that would make it an eighth larger than the smallest: a row
        that goes to another one has to wait once for its token.
        """
        if not self.are_several:
            self.now.rows = np.concatenate([self.now.rows, slots])
            return
        sizes = [len(micro_batch.rows) for micro_batch in self._all]
        assigned: list[list[int]] = [[] for _ in sizes]
        own = self._all.index(self.now)
        for slot in slots.tolist():
            least = min(range(len(sizes)), key=sizes.__getitem__)
            to = least if sizes[own] - sizes[least] > sizes[own] // 8 else own
            sizes[to] += 1
            assigned[to].append(slot)
        for micro_batch, new in zip(self._all, assigned, strict=True):
            if new:
                micro_batch.rows = np.concatenate([micro_batch.rows, np.asarray(new, np.int32)])

    def remove(self, slot: int) -> None:
        """Remove a row from the micro-batch that it is in, if any."""
        for micro_batch in self._all:
            if (others := micro_batch.rows != slot).all():
                continue
            micro_batch.rows = micro_batch.rows[others]

    def forget_sent(self) -> None:
        """The workers no longer hold any rows."""
        for micro_batch in self._all:
            micro_batch.sent = None

    def check(self) -> set[int]:
        """Assert that each slot is in one micro-batch only, once; returns all slots."""
        rows = [slot for micro_batch in self._all for slot in micro_batch.rows.tolist()]
        assert len(set(rows)) == len(rows)
        return set(rows)
