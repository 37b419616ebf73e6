"""WaitingQueue: sequences without a slot, in the order in which they will start, in queues by what they wait for. No I/O.

There are three kinds of queue, each in order. *Ready* sequences wait for a slot and KV blocks, with a queue for each tenant.
Some wait aside, with a queue for each thing that they wait for: until another sequence has computed a prefix that they share,
or until there is a lease for them that others do not need. Deferred ones wait until their next mask is made: no step is made
for them, and none reserves tokens for them. A step looks at the ready queues only, however many wait in the others.

`first` is the first ready sequence of the tenant that has had the fewest tokens by its weight, of those that may run one more.
A tenant that comes back starts level with the others: it saves nothing up. Admission looks at sequences and takes them
(admission.py); leaving.py reports freed resources here.
"""

import bisect
import heapq
from collections.abc import Iterator
from itertools import islice

from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tenants.tenant import TenantState

Key = tuple[int, int]  # unique, so that sequences are never compared
Queue = list[tuple[Key, Sequence]]  # sorted

BEFORE_ALL = -(1 << 63)  # comes before every priority


class WaitingQueue:
    """fcfs: by arrival. priority: by (priority, arrival), but after `ages_after_s` by arrival, before all others; 0: never.
    Both within a tenant. Preempted sequences return to their former place."""

    def __init__(self, policy: str, ages_after_s: float = 0.0):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"no scheduling policy named {policy!r}; there are fcfs and priority")
        self._by_priority = policy == "priority"
        self._ages_after_s = ages_after_s if self._by_priority else 0.0
        self._only = TenantState()  # of sequences without one
        self._with_ready: list[TenantState] = []  # tenants with ready sequences
        self._owed: TenantState | None = None  # comes first, as a sequence was preempted for it
        self._level = 0.0  # what the tenant of the last turn had had by then
        self._aside: dict[bytes, Queue] = {}  # the hash of a prefix's last block, or a lease's key -> its queue
        self._deferred: Queue = []
        self._queue_of: dict[Sequence, Queue] = {}  # each waiting sequence's queue
        self._by_age: list[tuple[float, int, Sequence]] = []  # a heap by arrival time, if sequences age
        self._num_ever = 0
        self.no_room_for: Sequence | None = None  # the first ready sequence, if it did not fit when it was last checked

    def _entry(self, seq: Sequence) -> tuple[Key, Sequence]:
        if not self._by_priority:
            return (0, seq.order[1]), seq
        return ((BEFORE_ALL, seq.order[1]) if seq.is_aged else seq.order), seq

    def push(self, seq: Sequence) -> None:
        seq.tenant = tenant = seq.tenant or self._only
        if not tenant.num_waiting:
            tenant.served = max(tenant.served, self._level)
        tenant.add_waiting(seq.prompt_cost, seq.prompt_cost + seq.expected_output)
        if self._ages_after_s and not seq.is_aged:
            self._num_ever += 1
            heapq.heappush(self._by_age, (seq.arrival_time, self._num_ever, seq))
        self._enqueue(seq, self._deferred if seq.is_deferred else tenant.ready)

    def release(self, seq: Sequence) -> None:
        """The sequence is no longer deferred."""
        self.remove(seq)
        self.push(seq)

    def _enqueue(self, seq: Sequence, queue: Queue) -> None:
        tenant = self._tenant(seq)
        if queue is tenant.ready and not queue:
            self._with_ready.append(tenant)
        self._queue_of[seq] = queue
        bisect.insort(queue, self._entry(seq))

    def _dequeue(self, seq: Sequence) -> None:
        tenant, queue = self._tenant(seq), self._queue_of.pop(seq)
        del queue[bisect.bisect_left(queue, self._entry(seq))]
        if queue is tenant.ready and not queue:
            self._with_ready.remove(tenant)
        if seq is self.no_room_for:
            self.no_room_for = None

    def _tenant(self, seq: Sequence) -> TenantState:
        assert seq.tenant is not None
        return seq.tenant

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its queue. Raises KeyError if it does not wait."""
        self._dequeue(seq)
        self._tenant(seq).remove_waiting(seq.prompt_cost, seq.prompt_cost + seq.expected_output)

    # ----------------------------------------------------------------------------------------------------- in turn
    def first(self) -> Sequence | None:
        """The next sequence in order that could start."""
        tenant = self._next_tenant()
        return None if tenant is None else tenant.ready[0][1]

    def _next_tenant(self) -> TenantState | None:
        tenants, owed = self._with_ready, self._owed
        if owed is not None and owed.ready and owed.may_start:
            return owed
        if len(tenants) < 2:
            return tenants[0] if tenants and tenants[0].may_start else None
        return min((tenant for tenant in tenants if tenant.may_start), key=_served, default=None)

    def owe(self, seq: Sequence) -> None:
        """A sequence was preempted for this one: what that gives back is its tenant's, whoever has had less."""
        self._owed = seq.tenant

    def could_start(self) -> Iterator[Sequence]:
        """Ready sequences, a tenant after the other, those of a tenant in order. The queue may not change meanwhile."""
        for tenant in sorted(self._with_ready, key=_served):
            most = tenant.limits.max_running
            yield from (seq for _, seq in islice(tenant.ready, None if most is None else max(most - tenant.num_running, 0)))

    def age(self, now: float) -> None:
        """Move sequences to the front that have waited for `ages_after_s`. now: seconds since the Unix epoch."""
        while self._by_age and self._by_age[0][0] + self._ages_after_s <= now:
            _, _, seq = heapq.heappop(self._by_age)
            if (queue := self._queue_of.get(seq)) is None:
                continue
            self._dequeue(seq)
            seq.is_aged = True
            self._enqueue(seq, queue)

    def started(self, seq: Sequence, num_known: int, num_cached: int) -> None:
        """A sequence that was removed has got a slot: its tenant is charged for what it is expected to need.

        What is computed again after a preemption is free."""
        tenant = self._tenant(seq)
        if tenant is self._owed:
            self._owed = None
        self._level = max(self._level, tenant.served)
        num_cached = num_cached if seq.tokens is None else num_known
        charged = num_known - num_cached + max(seq.expected_output - (num_known - len(seq.prompt)), 1)
        seq.stint = num_known, num_cached, charged
        tenant.start(charged)

    def stopped(self, seq: Sequence, num_known: int) -> None:
        """A sequence gives its slot back, with so many known tokens: its tenant is charged for what it really needed."""
        num_before, num_cached, charged = seq.stint
        num_computed = min(seq.num_computed, num_before)  # of what was known, as far as it came
        self._tenant(seq).stop(charged, max(num_computed - num_cached, 0) + num_known - num_before)

    # -------------------------------------------------------------------------------------------- aside
    def wait_for(self, seq: Sequence, key: bytes) -> None:
        """Let a sequence wait until `resolved(key)`."""
        self._dequeue(seq)
        self._enqueue(seq, self._aside.setdefault(key, []))

    def resolved(self, key: bytes) -> None:
        """Return the sequences that waited for this to their places in the ready queues."""
        back = self._aside.pop(key, [])
        for tenant in {self._tenant(seq): None for _, seq in back}:
            if not tenant.ready:
                self._with_ready.append(tenant)
            tenant.ready += [entry for entry in back if entry[1].tenant is tenant]
            tenant.ready.sort()  # merges two sorted runs
        self._queue_of.update((seq, self._tenant(seq).ready) for _, seq in back)

    def aside(self, key: bytes) -> list[Sequence]:
        """Those that wait for this."""
        return [seq for _, seq in self._aside.get(key, ())]

    def __len__(self) -> int:
        return len(self._queue_of)

    @property
    def num_to_schedule(self) -> int:
        """The number of sequences that are not deferred."""
        return len(self._queue_of) - len(self._deferred)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._queue_of))

    def check(self) -> None:
        """Assert that every sequence is in one queue, and every queue is in order."""
        queues = [self._deferred, *self._aside.values(), *(tenant.ready for tenant in self._with_ready)]
        assert all(seq.is_deferred == (self._queue_of[seq] is self._deferred) for seq in self._queue_of)
        assert all(queue == sorted(queue, key=lambda entry: entry[0]) for queue in queues)
        assert sum(map(len, queues)) == len(self._queue_of)
        assert all(tenant.ready for tenant in self._with_ready)
        for tenant in {self._tenant(seq): None for seq in self._queue_of}:
            tenant.check()


def _served(tenant: TenantState) -> float:
    return tenant.served
