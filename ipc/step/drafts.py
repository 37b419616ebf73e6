"""StepDrafts: the drafts of a step in flight, as the result ring will have them before the step's tokens.

A step writes its drafts as soon as its inputs are built, if its plan has a mask_window above 1: the masks of a row's window
depend on them. Words lie in the order of the samples, FIRST_PLACE for each row's first one. Made by the core's loop, waited for
by the threads that make masks; it keeps the ring's memory alive.
"""

import numpy as np

from quire.ipc.step.sections import FIRST_PLACE, STEP_MASK, UNUSED


class StepDrafts:
    def __init__(self, words: np.ndarray, step: int) -> None:
        """words: uint64 [rows + most drafts] of the ring; each says which step it is of."""
        self._words, self._step = words, step & STEP_MASK
        self._rows: list[list[int]] | None = None
        self.is_given_up = False  # no work needs them any more, and they may never come

    def have_come(self) -> bool:
        if self._rows is None:
            words = self._words.copy()
            if (words >> np.uint64(32) != self._step).any():
                return False
            self._rows = _by_row(words.astype(np.uint32).view(np.int32))
        return True

    def of_row(self, row: int) -> list[int]:
        """The drafts of a row, once they have come."""
        assert self._rows is not None
        return self._rows[row]


def _by_row(words: np.ndarray) -> list[list[int]]:
    firsts = (words == FIRST_PLACE).nonzero()[0].tolist()
    ids = words[words != UNUSED].tolist()
    return [ids[begin + 1 : end] for begin, end in zip(firsts, [*firsts[1:], len(ids)], strict=True)]
