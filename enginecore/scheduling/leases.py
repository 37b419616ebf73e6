"""Leases: what is scarce, and held by running sequences: slots, recurrent states, KV blocks and adapter slots. No I/O.

A sequence takes from every lease when it is admitted, and gives everything back when the last step that uses it has returned
(leaving.py). Admission asks `are_enough` first. A resource that may grow while a sequence runs, as blocks do, is taken directly
from its owner then.
"""

from typing import Protocol

from quire.enginecore.adapters.slots import AdapterSlots
from quire.enginecore.kv.manager import KVManager
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.sequence import Sequence, Slots


class Lease(Protocol):
    """One scarce resource."""

    @property
    def free(self) -> int:
        """Units that `take` could give out now."""

    def need(self, seq: Sequence) -> int:
        """Units that a sequence takes if it starts now."""

    def take(self, seq: Sequence) -> None:
        """Give the sequence what it needs, which must be free."""

    def give_back(self, seq: Sequence) -> None:
        """The sequence no longer uses it, in any step."""

    def check(self, held: list[Sequence]) -> None:
        """Assert that nothing is lost or held twice. held: all sequences that have taken from the leases."""


class Blocks:
    """KV blocks. A sequence starts with those that the prefix cache has for it, and needs as many as its tokens fill."""

    def __init__(self, kv: KVManager):
        self._kv = kv

    @property
    def free(self) -> int:
        return self._kv.pool.num_available

    def need(self, seq: Sequence) -> int:
        """Blocks for all its known tokens and one more. `Admission` has looked it up in the prefix cache."""
        hits, kv = seq.blocks.hits, self._kv
        return max(int(kv.blocks_needed(len(seq.known) + 1)) - hits.num_held, kv.num_groups) + hits.num_unused

    def take(self, seq: Sequence) -> None:
        self._kv.attach(seq.blocks)

    def give_back(self, seq: Sequence) -> None:
        self._kv.free(seq.blocks)

    def check(self, held: list[Sequence]) -> None:
        self._kv.check([seq.blocks for seq in held])


class OwnStates:
    """Recurrent states, of models that have them: a sequence has one of its own, and may begin with one that is kept. They are
    taken before blocks: the sequence's hits say where it begins."""

    def __init__(self, kv: KVManager):
        self._states = kv.states

    @property
    def free(self) -> int:
        return self._states.num_available

    def need(self, seq: Sequence) -> int:
        return self._states.need(seq.blocks)

    def take(self, seq: Sequence) -> None:
        self._states.take(seq.blocks, len(seq.known))

    def give_back(self, seq: Sequence) -> None:
        self._states.free(seq.blocks)

    def check(self, held: list[Sequence]) -> None:
        self._states.check([seq.blocks for seq in held])


class Leases:
    """All leases, in the order in which they are taken; they are given back in reverse."""

    def __init__(self, *leases: Lease, adapters: AdapterSlots | None = None):
        """adapters: one more lease, taken before all others: a sequence that has to wait for it waits aside, not in the way of
        those behind it."""
        self._all = leases if adapters is None else (adapters, *leases)
        self.adapters = adapters

    def are_enough(self, seq: Sequence) -> bool:
        """Whether a sequence can take what it needs now."""
        return all(lease.need(seq) <= lease.free for lease in self._all)

    def take(self, seq: Sequence) -> None:
        for lease in self._all:
            lease.take(seq)

    def give_back(self, seq: Sequence) -> None:
        for lease in reversed(self._all):
            lease.give_back(seq)

    def waits_for(self, seq: Sequence) -> bytes | None:
        """A key of WaitingQueue.wait_for, for something that others do not need; None: it waits for nothing."""
        return None if self.adapters is None else self.adapters.waits_for(seq)

    def take_resolved(self) -> list[bytes]:
        """Keys of what is there now, of what sequences were told to wait for."""
        return [] if self.adapters is None else self.adapters.take_resolved()

    def forget(self) -> None:
        """The workers are gone, with all that was on their devices. Every sequence has given back what it had."""
        if self.adapters is not None:
            self.adapters.forget()

    def check(self, held: list[Sequence]) -> None:
        for lease in self._all:
            lease.check(held)


def leases_of(config: SchedulerConfig, slots: Slots, kv: KVManager) -> Leases:
    """The leases of an engine."""
    adapters = AdapterSlots(config.num_adapter_slots, config.max_queue_s) if config.num_adapter_slots else None
    return Leases(slots, OwnStates(kv), Blocks(kv), adapters=adapters)
