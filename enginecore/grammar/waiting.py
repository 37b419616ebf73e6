"""Waiting: the rows of a step in flight for which masks were not requested yet. No I/O. Owned by GrammarSteps."""

from dataclasses import dataclass

import numpy as np

from quire.enginecore.grammar.work import Work
from quire.enginecore.scheduling.step import ScheduledStep
from quire.ipc.step.drafts import StepDrafts


@dataclass(slots=True)
class Waiting:
    """Rows, int32 [n], and a Work for each row that needs only its grammar.

    The works are prepared while the workers run the step before. When that step returns, the workers wait for the masks."""

    scheduled: ScheduledStep
    rows: np.ndarray
    slots: np.ndarray
    works: list[Work | None]
    is_plain: np.ndarray  # bool [n]: has such a Work
    drafts: StepDrafts | None  # of the step, if rows with masks have windows
    has_window: np.ndarray  # bool [n]

    @property
    def lacks_drafts(self) -> bool:
        """Whether masks cannot be made yet because the workers have not begun the step, and rows have windows."""
        return self.drafts is not None and not self.drafts.have_come()

    def keep(self, left: np.ndarray) -> None:
        """left: bool [n]."""
        self.works = [self.works[i] for i in left.nonzero()[0].tolist()]
        self.rows, self.slots, self.is_plain = self.rows[left], self.slots[left], self.is_plain[left]
        self.has_window = self.has_window[left]
