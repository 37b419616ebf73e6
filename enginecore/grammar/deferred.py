"""DeferredSequences: sequences that are in no step until their next mask is made, so that a slow grammar delays only itself.

There are two cases. A sequence with a slow grammar is scheduled only when its next mask is ready, one token at a time
(`defer_slow`). A sequence with a late mask for a step in flight loses its row there: the step goes on without a token for the
row, and the sequence is preempted (`defer_late`). A mask that is made meanwhile waits in the sequence's constraint for its next
row. Owned by GrammarSteps; queues, blocks and slots are the scheduler's.
"""

import math

import numpy as np

from quire.enginecore.grammar.masks import MASK_TIMEOUT_S
from quire.enginecore.grammar.work import Work
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.scheduling.step import ScheduledStep


class DeferredSequences:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since: dict[Sequence, float] = {}  # when its mask was requested
        self._slow: dict[Sequence, None] = {}  # those with a grammar that was slow the last time

    def __bool__(self) -> bool:
        return bool(self._since)

    def are_slow(self, works: list[Work]) -> None:
        """The grammars of these works were found slow, or still are."""
        self._slow.update((work.seq, None) for work in works if work.seq.state is not SequenceState.FINISHED)

    def forget_ended(self) -> None:
        """Drop sequences that have ended. `defer_slow` does it, too, but is not called while no step has mask rows."""
        if self._slow:
            self._slow = {seq: None for seq in self._slow if seq.state is not SequenceState.FINISHED}

    def defer_slow(self, scheduled: ScheduledStep, rows: np.ndarray) -> None:
        """After this step, defer the sequences of these mask rows that have slow grammars."""
        if not self._slow:
            return
        self._slow = {s: None for s in self._slow if s.state is not SequenceState.FINISHED and s.constraint.is_slow}
        slots = set(scheduled.slots[rows].tolist())
        for seq in self._slow:
            if seq.slot in slots and seq.constraint.reasoning is None:
                self._scheduler.defer(seq)
                self._since[seq] = math.inf

    def defer_late(self, scheduled: ScheduledStep, rows: list[int], now: float) -> np.ndarray:
        """Drop, from a step in flight, those of `rows` for which masks are being made; returns them, int32 [n]."""
        slots = self._scheduler.slots
        late = [row for row in rows if slots.sequence(scheduled.slots[row]).constraint is not None]
        for row in late:
            seq = slots.sequence(scheduled.slots[row])
            self._scheduler.drop_row(scheduled, row)
            self._since[seq] = now
        return np.asarray(late, np.int32)

    def has_asked(self, work: Work, now: float) -> None:
        """The mask of a deferred sequence was requested before any step has a row for it."""
        self._since[work.seq] = now

    def take(self, work: Work, mask: np.ndarray | None) -> None:
        """The mask of a deferred sequence, int32 [words] (None: any token), is ready: it may go on."""
        if self._since.pop(work.seq, None) is not None and work.seq.state is not SequenceState.FINISHED:
            seq = work.seq
            work.constraint.mask = mask.copy() if mask is not None else None
            if seq.slot >= 0:
                self._scheduler.slots.mask_window[seq.slot] = seq.mask_window
            self._scheduler.release(seq)

    def release_all(self) -> None:
        """The steps in flight are lost, and with them the tokens that these sequences wait for. A mask that is still being made
        is dropped when it comes."""
        since, self._since = self._since, {}
        for seq in since:
            if seq.state is not SequenceState.FINISHED:
                self._scheduler.release(seq)

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences that have waited for too long; they and those that have ended are forgotten."""
        late = [seq for seq, since in self._since.items() if now >= since + MASK_TIMEOUT_S]
        for seq in [*late, *(seq for seq in self._since if seq.state is SequenceState.FINISHED)]:
            self._since.pop(seq, None)
        return late
