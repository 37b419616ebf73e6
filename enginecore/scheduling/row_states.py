"""Recurrent states of decode rows: where they leave checkpoints, and, with windows, when states catch up. No I/O.

Without windows a row's state has all of its computed tokens, and a copy is kept where a block ends. With windows a state stays
a step behind: layers keep the inputs of a window's tokens, and the row's next step applies those that were accepted. Then

    [0, applied)            tokens in the row's own state, known when the results of its last step are back
    [applied, computed)     accepted tokens of the row's last step, of which inputs are kept; none if it is not `pending`

A step keeps inputs where those of the step before the last one were. So what is pending is applied in the very next step: by
the row itself, or before the step, if the row has no window in it. The workers leave a row's state at a *place*, within a
window, too: when the place may be reached, the state is promised an id, and it is there once `applied` has passed the place.
DecodeRows (decode.py) calls all of this.
"""

import numpy as np

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Sequence, Slots
from quire.enginecore.scheduling.step import ScheduledStep
from quire.ipc.step.sections import INT32_MAX

NEVER = INT32_MAX


class RowStates:
    """The states of rows without windows; nothing for models without recurrent layers."""

    def __init__(self, slots: Slots, kv: KVManager):
        self._slots, self._kv = slots, kv

    def add(self, seq: Sequence) -> None:
        """The sequence is a decode row from the next step on."""

    def filled(self, build: PlanBuilder, seq: Sequence) -> None:
        """A row goes on behind the end of its last block."""
        end = int(self._slots.capacity[seq.slot])
        build.state_copies += self._kv.states.leave_while_decoding(seq.blocks, end)

    def begin(self, rows: np.ndarray) -> None:
        """A step's decode rows will be some of these. No prompt has been given a state to begin with in it yet."""

    def schedule(self, build: PlanBuilder, rows: np.ndarray) -> None:
        """The step's decode rows and its window are chosen; the bounds of lengths are still those before it."""

    def returned(self, step: ScheduledStep, counts: np.ndarray) -> None:
        """A step's tokens are about to be taken. counts: bool [rows], whether a row's do."""

    def leave(self, seq: Sequence) -> None:
        """The sequence is about to give back its states; all of its steps have returned."""
        self._kv.states.keep_own(seq.blocks, int(self._slots.sched_tokens[seq.slot]) - 1)

    def forget(self) -> None:
        """The workers are gone, with all states."""


class WindowRowStates(RowStates):
    """The states of rows that may have windows. All tables are by slot."""

    def __init__(self, slots: Slots, kv: KVManager):
        super().__init__(slots, kv)
        n = len(slots.sequences)
        self._pending = np.zeros(n, bool)  # inputs are kept that no scheduled step applies
        self._applied = np.zeros(n, np.int32)  # tokens in its state before its last step; NEVER: only more is known
        self._place = np.zeros(n, np.int32)  # where its state is left next; 0: it is no decode row
        self._promised = np.zeros(n, bool)  # an id is reserved for that
        # for the next plan that is made: fields of KEPT_INPUTS by slot, and of STATE_COPY
        self._due: dict[int, tuple[int, int, int, int]] = {}
        self._copies: list[tuple[int, int]] = []

    def add(self, seq: Sequence) -> None:
        if not self._place[seq.slot]:
            self._place[seq.slot] = self._place_behind(seq.blocks.states.num_known) if seq.blocks.use_cache else NEVER
            self._applied[seq.slot] = 0

    def _place_behind(self, num_tokens: int) -> int:
        return (num_tokens // self._kv.states.period + 1) * self._kv.states.period

    def filled(self, build: PlanBuilder, seq: Sequence) -> None:
        """Places are no ends of blocks here: several blocks may be filled at once, or none."""

    def begin(self, rows: np.ndarray) -> None:
        t = self._slots
        reach = np.minimum(t.sched_upper, t.final_len) - 1
        near = self._pending & t.alive
        near[rows] = True
        for slot in (near & (self._place <= reach) & ~self._promised).nonzero()[0].tolist():
            self._promise(slot)

    def schedule(self, build: PlanBuilder, rows: np.ndarray) -> None:
        waits = self._pending & self._slots.alive
        waits[rows] = waits[rows] & (build.window == 1)
        waits[rows] |= self._promised[rows] & ~self._pending[rows]  # the place may be where the row's state is now
        build.kept_inputs += [*self._due.values(), *((slot, -1, 0, 1) for slot in waits.nonzero()[0].tolist())]
        build.state_copies += self._copies
        self._due, self._copies = {}, []
        self._pending[:] = False
        if build.window > 1:
            self._pending[rows] = True

    def _promise(self, slot: int) -> None:
        """The row's state may reach its place in this step."""
        t, held, place = self._slots, self._slots.sequence(slot).blocks, int(self._place[slot])
        if not self._pending[slot] and t.sched_tokens[slot] == t.sched_upper[slot]:  # its length is known, as without windows
            if t.sched_tokens[slot] - 1 == place and t.sched_tokens[slot] < t.final_len[slot]:  # else it is at its end: `leave`
                self._copies += self._kv.states.leave_while_decoding(held, place)
        elif state := self._kv.states.promise(held, place):
            self._due[slot] = (slot, place, state, 0)
            self._promised[slot] = True
            return
        self._place[slot] = self._place_behind(int(t.sched_upper[slot]) - 1)

    def returned(self, step: ScheduledStep, counts: np.ndarray) -> None:
        slots, t = step.slots, self._slots
        self._applied[slots] = np.where(counts, t.num_tokens[slots] - 1, NEVER)
        passed = counts & self._promised[slots] & (self._place[slots] <= self._applied[slots])
        for slot in slots[passed].tolist():
            self._fulfil(t.sequence(slot))

    def _fulfil(self, seq: Sequence) -> None:
        self._kv.states.fulfil(seq.blocks)
        self._promised[seq.slot] = False
        reached = int(self._slots.sched_upper[seq.slot]) - 1  # at most: a place that a row has passed is not looked for again
        self._place[seq.slot] = self._place_behind(max(reached, int(self._place[seq.slot])))

    def leave(self, seq: Sequence) -> None:
        """Its newest place within the known tokens is kept: as it was left, or in its own state, which ends there."""
        slot, held, states = seq.slot, seq.blocks, seq.blocks.states
        known = int(self._slots.num_tokens[slot]) - 1
        place, own = known // self._kv.states.period * self._kv.states.period, held.state
        applied = int(self._applied[slot])
        if applied != NEVER and not self._pending[slot]:
            applied = known
        if states.end == states.num_known and applied > place:
            if self._promised[slot] and self._place[slot] == place:
                self._fulfil(seq)
        elif self._kv.states.keep_own(held, place) and self._pending[slot] and applied < place:
            self._due[slot] = (slot, place, own, 1)
        self._place[slot], self._promised[slot], self._pending[slot] = 0, False, False

    def forget(self) -> None:
        self._pending[:] = False
        self._due, self._copies = {}, []
