"""HeldSequences: those that are in no step until their next mask is made, so that a slow grammar holds up nobody but itself.

There are two ways in. Whose grammar is known to be slow has one token at a time, which is scheduled when its mask is there
(`hold`). Whose mask is late for a step in flight is left out of that: the step goes on without a token for its row, and the
sequence is preempted (`set_aside`). A mask that is made meanwhile waits in the sequence's constraint for its next row.
Owned by GrammarSteps; queues, blocks and slots are the scheduler's.
"""

import math

import numpy as np

from quire.enginecore.grammar.mask_threads import Work
from quire.enginecore.grammar.masks import MASK_TIMEOUT_S
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.scheduling.step import ScheduledStep


class HeldSequences:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since: dict[Sequence, float] = {}  # when its mask was asked for
        self._slow: dict[Sequence, None] = {}  # whose grammar was slow when it was looked at last

    def __bool__(self) -> bool:
        return bool(self._since)

    def are_slow(self, works: list[Work]) -> None:
        """The grammars of these were found slow, or still are."""
        self._slow.update((work.seq, None) for work in works if work.seq.state is not SequenceState.FINISHED)

    def forget_ended(self) -> None:
        """While no step has masks: `hold`, which does so, may not be called for long."""
        if self._slow:
            self._slow = {seq: None for seq in self._slow if seq.state is not SequenceState.FINISHED}

    def hold(self, scheduled: ScheduledStep, rows: np.ndarray) -> None:
        """After this step, hold the sequences of those of its rows whose grammars are slow."""
        if not self._slow:
            return
        self._slow = {s: None for s in self._slow if s.state is not SequenceState.FINISHED and s.constraint.is_slow}
        slots = set(scheduled.slots[rows].tolist())
        for seq in self._slow:
            if seq.slot in slots and seq.constraint.thinking is None:
                self._scheduler.hold(seq)
                self._since[seq] = math.inf

    def set_aside(self, scheduled: ScheduledStep, rows: list[int], now: float) -> np.ndarray:
        """Leave these rows out of a step in flight, as far as masks are being made for them; returns these, int32 [n]."""
        slots = self._scheduler.slots
        late = [row for row in rows if slots.sequence(scheduled.slots[row]).constraint is not None]
        for row in late:
            seq = slots.sequence(scheduled.slots[row])
            self._scheduler.set_aside(scheduled, row)
            self._since[seq] = now
        return np.asarray(late, np.int32)

    def has_asked(self, work: Work, now: float) -> None:
        """The mask of a held sequence was asked for, ahead of any step."""
        self._since[work.seq] = now

    def take(self, work: Work, mask: np.ndarray) -> None:
        """A held sequence's mask, int32 [words], is there: it may go on."""
        if self._since.pop(work.seq, None) is not None and work.seq.state is not SequenceState.FINISHED:
            work.constraint.mask = mask.copy()
            self._scheduler.release(work.seq)

    def overdue(self, now: float) -> list[Sequence]:
        """Those that have waited for too long; they and those that have ended are forgotten."""
        late = [seq for seq, since in self._since.items() if now >= since + MASK_TIMEOUT_S]
        for seq in [*late, *(seq for seq in self._since if seq.state is SequenceState.FINISHED)]:
            self._since.pop(seq, None)
        return late
