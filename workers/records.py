"""Records: the plan ring as a worker's loop reads it: plans and control requests, and the masks that a step waits for.

Other records that come while a step waits for masks are kept until the step is done. A control request does not end the wait;
another plan does (see ipc/step/masks.py).
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from quire.ipc.step.masks import RowsAndMasks, decode_masks, rows_and_places
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_MASK, PlanReader
from quire.ipc.step.sections import MASKS_NONE

MASK_WAIT_S = 1.0  # of one read: the whole wait has no limit here, for the core has one
MASK_SPIN_S = 2e-4


class Records:
    def __init__(self, reader: PlanReader, mask_spin_s: float = MASK_SPIN_S) -> None:
        """mask_spin_s: how long a step spins for its masks before it sleeps."""
        self._reader = reader
        self._mask_spin_s = mask_spin_s
        self._kept: deque[tuple[int, np.ndarray]] = deque()

    def read(self, timeout_s: float, spin_s: float) -> tuple[int, np.ndarray] | None:
        """The next plan, control request or shutdown as (kind, words), or None; the words are valid until the next call."""
        if self._kept:
            return self._kept.popleft()
        record = self._reader.read(timeout_s, spin_s)
        while record is not None and record[0] == KIND_MASK:  # of a step that went on without it
            record = self._reader.read(0.0)
        return record

    def masks(self, plan: StepPlan) -> Iterator[RowsAndMasks]:
        """Yield masks of the plan's mask_rows as they come; each is valid until the next. Rows that get none are left out."""
        due = set(plan.mask_rows.tolist())
        while due:
            record = self._reader.read(MASK_WAIT_S, self._mask_spin_s)
            if record is None:
                continue
            kind, words = record
            if kind == KIND_CONTROL:
                self._kept.append((kind, words.copy()))
            elif kind != KIND_MASK:
                self._kept.append((kind, words.copy()))
                return
            elif (come := decode_masks(words, self._reader.area)).step == plan.step:
                has_places = plan.window > 1 and come.masks is not None
                named = set((rows_and_places(come.rows)[0] if has_places else come.rows).tolist())
                if not named <= due:
                    raise RuntimeError(f"masks came for rows {sorted(named - due)} of step {plan.step}, which wait for none")
                due -= named
                if come.kind != MASKS_NONE:
                    yield come.rows, come.masks
