"""WaitingQueue: sequences without a slot, in the order in which they will start, in queues by what they wait for. No I/O.

There are three kinds of queue, each in order. *Ready* sequences wait for a slot and KV blocks. Some wait until another sequence
has computed a prefix that they share, with a queue for each prefix. Deferred ones wait until their next mask is made: no step
is made for them, and none reserves tokens for them. A step looks at the ready queue only, however many wait in the others.
`first` is the first ready sequence. Admission looks at sequences and takes them (admission.py); leaving.py reports freed
resources here.
"""

import bisect
from collections.abc import Iterator

from quire.enginecore.scheduling.sequence import Sequence

Key = tuple[int, int]  # unique, so that sequences are never compared
Queue = list[tuple[Key, Sequence]]  # sorted


class WaitingQueue:
    """fcfs: by arrival. priority: by (priority, arrival). Preempted sequences return to their former place."""

    def __init__(self, policy: str):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"no scheduling policy named {policy!r}; there are fcfs and priority")
        self._by_priority = policy == "priority"
        self._ready: Queue = []
        self._for_prefix: dict[bytes, Queue] = {}  # hash of the prefix's last block -> its queue
        self._deferred: Queue = []
        self._queue_of: dict[Sequence, Queue] = {}  # each waiting sequence's queue
        self.no_room_for: Sequence | None = None  # the first ready sequence, if it did not fit when it was last checked

    def _entry(self, seq: Sequence) -> tuple[Key, Sequence]:
        return (seq.order if self._by_priority else (0, seq.order[1])), seq

    def push(self, seq: Sequence) -> None:
        self._enqueue(seq, self._deferred if seq.is_deferred else self._ready)

    def release(self, seq: Sequence) -> None:
        """The sequence is no longer deferred."""
        self.remove(seq)
        self.push(seq)

    def _enqueue(self, seq: Sequence, queue: Queue) -> None:
        self._queue_of[seq] = queue
        bisect.insort(queue, self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its queue. Raises KeyError if it does not wait."""
        queue = self._queue_of.pop(seq)
        del queue[bisect.bisect_left(queue, self._entry(seq))]
        if seq is self.no_room_for:
            self.no_room_for = None

    def first(self) -> Sequence | None:
        """The next sequence in order that could start."""
        return self._ready[0][1] if self._ready else None

    def could_start(self) -> Iterator[Sequence]:
        """All ready sequences in order. The queue may not change while this is iterated."""
        return (seq for _, seq in self._ready)

    # -------------------------------------------------------------------------------------------- shared prefixes
    def wait_for_prefix(self, seq: Sequence, block_hash: bytes) -> None:
        """Let a sequence wait until `prefix_resolved(block_hash)`."""
        self.remove(seq)
        self._enqueue(seq, self._for_prefix.setdefault(block_hash, []))

    def prefix_resolved(self, block_hash: bytes) -> None:
        """Return the sequences that waited for this prefix to their places in the ready queue."""
        back = self._for_prefix.pop(block_hash, [])
        self._ready += back
        self._ready.sort()  # merges two sorted runs
        self._queue_of.update((seq, self._ready) for _, seq in back)

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
        queues = [self._ready, self._deferred, *self._for_prefix.values()]
        assert all(seq.is_deferred == (self._queue_of[seq] is self._deferred) for seq in self._queue_of)
        assert all(queue == sorted(queue, key=lambda entry: entry[0]) for queue in queues)
        assert [seq for queue in queues for _, seq in queue if self._queue_of.get(seq) is not queue] == []
        assert sum(map(len, queues)) == len(self._queue_of)
        assert self.no_room_for is None or self.no_room_for in self._queue_of
