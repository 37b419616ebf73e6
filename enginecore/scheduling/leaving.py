"""Leaving: how a running sequence leaves: because it has ended, its blocks are needed, or its workers died. No I/O.

A sequence that leaves computes nothing more, but keeps its slot and blocks until its last step in flight has returned. A
preempted sequence then waits again, at its old place in the queue. Called by the scheduler, and by decode rows, prefills and
admission when they lack blocks.
"""

from collections.abc import Iterator
from typing import NamedTuple

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.scheduling.decode import DecodeRows
from quire.enginecore.scheduling.leases import Leases
from quire.enginecore.scheduling.prefill import Prefills
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots
from quire.enginecore.scheduling.step import Counters
from quire.enginecore.scheduling.waiting import WaitingQueue

RUNNING = (SequenceState.PREFILL, SequenceState.DECODE)


class Lost(NamedTuple):
    """A sequence that had a slot when its workers died. was_in_step: a step of its was in flight, so it may be the cause."""

    seq: Sequence
    was_in_step: bool


class Leaving:
    def __init__(
        self,
        slots: Slots,
        kv: KVManager,
        leases: Leases,
        waiting: WaitingQueue,
        prefills: Prefills,
        decode: DecodeRows,
        counters: Counters,
    ):
        self._slots, self._kv, self._leases, self._counters = slots, kv, leases, counters
        self._waiting, self._prefills, self._decode = waiting, prefills, decode
        self._leaving: list[Sequence] = []  # finished or preempted, with a step in flight
        self.returned = 0  # the last step that has returned; set by the scheduler
        self.has_preempted = False  # in this step: then no sequence is admitted, so that a slot has one owner within a plan

    def __len__(self) -> int:
        return len(self._leaving)

    @property
    def is_draining(self) -> bool:
        """Whether one of the leaving sequences will wait again."""
        return any(s.state is SequenceState.DRAINING for s in self._leaving)

    def end(self, seq: Sequence) -> None:
        """End a sequence, for whatever reason; its blocks are given back when no step in flight uses them."""
        before, seq.state = seq.state, SequenceState.FINISHED
        if before is SequenceState.WAITING:
            self._waiting.remove(seq)
        elif before is not SequenceState.DRAINING:
            self._leave(seq, before)
        if seq.slot >= 0:
            self._slots.alive[seq.slot] = False

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence out; it waits again once its last step in flight has returned."""
        self._counters.preemptions += 1
        self.has_preempted = True
        before, seq.state = seq.state, SequenceState.DRAINING
        self._leave(seq, before)

    def make_room(self, seq: Sequence, blocks: int = 1) -> bool:
        """Make so many blocks per KV group available for `seq`, by preempting later sequences or itself; returns whether they
        are."""
        need, pool = self._kv.num_groups * blocks, self._kv.pool
        while pool.num_available < need:
            if pool.num_available + sum(s.blocks.num_held for s in self._leaving) >= need:
                return False  # blocks come back with a step in flight
            victim = max(self._running(), key=lambda s: s.order)
            if victim is seq and self._is_alone(seq):
                return False
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def lose_all(self, last_step: int) -> list[Lost]:
        """No step up to last_step will return any more: every running sequence waits again, with the tokens that are known."""
        last_steps, held = self._slots.last_step, [s for s in self._slots.sequences if s is not None]
        lost = [Lost(s, bool(last_steps[s.slot] > self.returned)) for s in held if s.state is not SequenceState.FINISHED]
        self.returned = last_step
        for seq, _ in lost:
            if seq.state in RUNNING:
                before, seq.state = seq.state, SequenceState.DRAINING
                self._leave(seq, before)
        self.release_returned()
        self._leases.forget()
        self._prefills.items.forget_all()
        return lost

    def preempt_for(self, seq: Sequence) -> None:
        """Preempt the youngest sequence of the tenant with the most slots by its weight, if that has more than one."""
        tenants = {s.tenant: None for s in self._running() if s.tenant is not None and s.tenant.num_running > 1}
        if tenants:
            most = max(tenants, key=lambda t: t.num_running / t.weight)
            self.preempt(max((s for s in self._running() if s.tenant is most), key=lambda s: s.order))
            self._waiting.owe(seq)

    def release_returned(self) -> None:
        """A step has returned: sequences with no other step in flight give back slot and blocks."""
        leaving, self._leaving = self._leaving, []
        for seq in leaving:
            self._release_when_returned(seq)

    def _leave(self, seq: Sequence, before: SequenceState) -> None:
        if before is SequenceState.DECODE:
            self._decode.remove(seq)
        else:
            self._prefills.remove(seq)
        self._slots.running[seq.slot] = False
        self._kv.remove_pending(seq.blocks)
        self._release_when_returned(seq)

    def _release_when_returned(self, seq: Sequence) -> None:
        if self._slots.last_step[seq.slot] > self.returned:
            self._leaving.append(seq)
        else:
            self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        self._decode.leave(seq)
        waits_again = seq.state is SequenceState.DRAINING
        if waits_again:
            seq.tokens = self._slots.known(seq).copy()
        self._waiting.stopped(seq, int(self._slots.num_tokens[seq.slot]))
        self._leases.give_back(seq)
        self._waiting.no_room_for = None
        if waits_again:
            seq.state, seq.num_computed = SequenceState.WAITING, 0
            self._waiting.push(seq)

    def _running(self) -> Iterator[Sequence]:
        return (s for s in self._slots.sequences if s is not None and s.state in RUNNING)

    def _is_alone(self, seq: Sequence) -> bool:
        return not self._leaving and all(s is seq for s in self._running())

    def check(self, held: list[Sequence]) -> None:
        """Assert that the leaving ones are those, of the sequences with a slot (`held`), that do not run."""
        assert set(self._leaving) == {s for s in held if s.state not in RUNNING}
