"""AdapterSlots: places on the device for adapters, leased by running sequences: those of one adapter share its slot. No I/O.

A slot is in one of these states:

    empty      nothing is there
    loading    the workers are reading an adapter into it; no sequence has it
    open       its adapter is there: sequences may start
    closed     its adapter is there, but no more of its sequences start: another adapter has waited for too long

An adapter is *wanted* from the arrival of a sequence that needs it, and when it has no open slot at that sequence's turn, the
sequence waits aside (WaitingQueue.wait_for). `turn` gives slots to wanted adapters, those first that have waited the longest:
an empty slot, or the least recently used one that no sequence has, in any step. A loaded adapter stays until one of its
sequences has started. So a sequence with a slot never waits for one without, and no adapter keeps a slot for ever.

It is a lease (scheduling/leases.py); Adapters (adapters.py) calls `turn` and tells the outcome of loads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.enginecore.adapters.registry import Adapter
from quire.enginecore.scheduling.sequence import Sequence

PATIENCE_S = 15.0  # if waiting has no bound
KEEP_S = 0.5  # between looks whether sequences still wait for an adapter that was loaded for them


def key_of(adapter: Adapter) -> bytes:
    """The key that its sequences wait for aside. Hashes of prefixes are of another length."""
    return b"adapter %d" % adapter.number


@dataclass(eq=False, slots=True)
class AdapterSlot:
    index: int
    adapter: Adapter | None = None
    is_loading: bool = False
    is_closed: bool = False
    is_pinned: bool = False  # an operator wants its adapter to stay
    num_running: int = 0
    used_at: int = 0  # of all takes and returns, the number of the last one
    loaded_at: float = 0.0
    kept_until: float = 0.0  # it is neither given away nor closed before; 0 once one of its sequences has started

    @property
    def is_open(self) -> bool:
        return self.adapter is not None and not self.is_loading and not self.is_closed

    def can_be_given(self, now: float) -> bool:
        return not (self.is_loading or self.is_pinned or self.num_running or now < self.kept_until)


@dataclass(eq=False, slots=True)
class Wanted:
    adapter: Adapter
    since: float | None = field(default=None)  # None: since the next turn


class Load(NamedTuple):
    """The workers should read an adapter into a slot."""

    adapter: Adapter
    slot: int


class AdapterSlots:
    """max_queue_s: the longest that a sequence may wait; half of it is how long adapters wait in peace. 0: no bound."""

    def __init__(self, num_slots: int, max_queue_s: float) -> None:
        self._slots = [AdapterSlot(i) for i in range(num_slots)]
        self._patience_s = max_queue_s / 2 or PATIENCE_S
        self._slot_of: dict[int, AdapterSlot] = {}  # by the adapter's number
        self._wanted: dict[int, Wanted] = {}  # by number, in the order in which they came
        self._resolved: list[bytes] = []
        self._uses = 0
        self.num_evictions = 0

    # ------------------------------------------------------------------------------------------------------ the lease
    @property
    def free(self) -> int:
        """Open slots: a sequence without one of them for its adapter was told to wait, so no other needs one."""
        return sum(slot.is_open for slot in self._slots)

    def need(self, seq: Sequence) -> int:
        return int(seq.adapter is not None)

    def take(self, seq: Sequence) -> None:
        if seq.adapter is None:
            return
        slot = self._slot_of[seq.adapter.number]
        assert slot.is_open, f"adapter {seq.adapter.number} has no open slot"
        seq.adapter_slot, slot.kept_until = slot.index, 0.0
        slot.num_running += 1
        self._used(slot)

    def give_back(self, seq: Sequence) -> None:
        if seq.adapter_slot >= 0:
            slot = self._slots[seq.adapter_slot]
            slot.num_running -= 1
            self._used(slot)
            seq.adapter_slot = -1

    def _used(self, slot: AdapterSlot) -> None:
        self._uses += 1
        slot.used_at = self._uses

    def waits_for(self, seq: Sequence) -> bytes | None:
        """As Leases.waits_for."""
        adapter: Adapter | None = seq.adapter
        if adapter is None:
            return None
        if self.is_open(adapter):
            return None
        self.want(adapter)
        return key_of(adapter)

    def take_resolved(self) -> list[bytes]:
        """As Leases.take_resolved."""
        resolved, self._resolved = self._resolved, []
        return resolved

    # ---------------------------------------------------------------------------------------------------------- slots
    @property
    def wanted(self) -> list[Adapter]:
        """Adapters that sequences wait for."""
        return [wanted.adapter for wanted in self._wanted.values()]

    @property
    def running(self) -> list[Adapter]:
        """Adapters of running sequences."""
        return [slot.adapter for slot in self._slots if slot.num_running and slot.adapter is not None]

    @property
    def is_settled(self) -> bool:
        """Whether `turn` has nothing to do."""
        return not self._wanted and not any(slot.is_closed for slot in self._slots)

    @property
    def num_pinned(self) -> int:
        return sum(slot.is_pinned for slot in self._slots)

    def pin(self, adapter: Adapter) -> bool:
        """Keep an adapter in its slot; returns whether it has an open one."""
        slot = self._slot_of.get(adapter.number)
        if slot is None or not slot.is_open:
            return False
        slot.is_pinned = True
        return True

    def is_open(self, adapter: Adapter) -> bool:
        slot = self._slot_of.get(adapter.number)
        return slot is not None and slot.is_open

    def want(self, adapter: Adapter) -> None:
        """Somebody waits for a slot of this adapter."""
        self._wanted.setdefault(adapter.number, Wanted(adapter))

    def unwant(self, adapter: Adapter) -> None:
        """No sequence waits for it any more."""
        self._wanted.pop(adapter.number, None)

    def slot_of(self, adapter: Adapter) -> AdapterSlot | None:
        return self._slot_of.get(adapter.number)

    def turn(self, now: float, waits: Callable[[Adapter], bool]) -> list[Load]:
        """Give slots to wanted adapters, as far as there are any; returns what the workers should load. now: seconds of a clock
        that never goes back. waits: whether some sequence waits for an adapter."""
        loads = []
        for slot in self._slots:
            if slot.kept_until and self._wanted and slot.kept_until <= now < slot.loaded_at + self._patience_s:
                assert slot.adapter is not None
                slot.kept_until = now + KEEP_S if waits(slot.adapter) else 0.0
        for wanted in list(self._wanted.values()):
            wanted.since = now if wanted.since is None else wanted.since
            if (load := self._serve(wanted.adapter, now)) is not None:
                loads.append(load)
        self._close_or_open(now)
        return loads

    def _serve(self, adapter: Adapter, now: float) -> Load | None:
        slot = self._slot_of.get(adapter.number)
        if slot is not None:
            if slot.is_open:
                self._resolve(adapter)
            return None
        found = min((slot for slot in self._slots if slot.can_be_given(now)), key=_last_use, default=None)
        if found is None:
            return None
        if found.adapter is not None:
            self.num_evictions += 1
        self._empty(found)
        found.adapter, found.is_loading = adapter, True
        self._slot_of[adapter.number] = found
        return Load(adapter, found.index)

    def _close_or_open(self, now: float) -> None:
        """Close as many slots as adapters have waited for too long: those with the fewest running sequences."""
        without = [wanted for wanted in self._wanted.values() if wanted.adapter.number not in self._slot_of]
        num_late = sum(wanted.since is not None and now - wanted.since >= self._patience_s for wanted in without)
        closed = [slot for slot in self._slots if slot.is_closed]
        if len(closed) > num_late:
            for slot in sorted(closed, key=_num_running)[num_late:]:
                slot.is_closed = False
                assert slot.adapter is not None
                self._resolve(slot.adapter)
        elif len(closed) < num_late:
            usable = sorted(
                (slot for slot in self._slots if slot.is_open and not slot.is_pinned and now >= slot.kept_until),
                key=_num_running,
            )
            for slot in usable[: num_late - len(closed)]:
                slot.is_closed = True

    def _resolve(self, adapter: Adapter) -> None:
        if self._wanted.pop(adapter.number, None) is not None:
            self._resolved.append(key_of(adapter))

    def loaded(self, load: Load, now: float) -> None:
        """The workers have read it. now: as in `turn`."""
        slot = self._slots[load.slot]
        assert slot.adapter is load.adapter and slot.is_loading
        slot.is_loading, slot.loaded_at, slot.kept_until = False, now, now + KEEP_S
        self._used(slot)
        self._resolve(load.adapter)

    def failed(self, load: Load) -> None:
        """The workers could not read it. Its sequences must not wait any more."""
        self._empty(self._slots[load.slot])
        self.unwant(load.adapter)

    def drop(self, adapter: Adapter) -> None:
        """No sequence will use it any more."""
        self.unwant(adapter)
        slot = self._slot_of.get(adapter.number)
        if slot is not None:
            assert not slot.num_running
            if not slot.is_loading:  # else `loaded` or `failed` comes, and the slot is given to another one later
                self._empty(slot)

    def forget(self) -> None:
        """As Leases.forget. The adapters that are loading will not come, and sequences that wait for it go on waiting."""
        for slot in self._slots:
            assert not slot.num_running
            self._empty(slot)

    def _empty(self, slot: AdapterSlot) -> None:
        if slot.adapter is not None:
            del self._slot_of[slot.adapter.number]
        slot.adapter, slot.is_loading, slot.is_closed, slot.is_pinned = None, False, False, False
        slot.used_at, slot.kept_until = 0, 0.0

    def check(self, held: list[Sequence]) -> None:
        """Assert that running sequences have the slots of their adapters, and that each adapter has one slot at most."""
        for slot in self._slots:
            of_slot = [seq for seq in held if seq.adapter_slot == slot.index]
            assert len(of_slot) == slot.num_running
            assert all(seq.adapter is slot.adapter for seq in of_slot)
            assert not (slot.num_running and slot.is_loading)
            assert slot.adapter is not None or not (slot.is_loading or slot.is_closed or slot.num_running)
        assert {n: s.index for n, s in self._slot_of.items()} == {
            slot.adapter.number: slot.index for slot in self._slots if slot.adapter is not None
        }
        assert all((seq.adapter is None) == (seq.adapter_slot < 0) for seq in held)


def _last_use(slot: AdapterSlot) -> int:
    return slot.used_at if slot.adapter is not None else -1


def _num_running(slot: AdapterSlot) -> int:
    return slot.num_running
