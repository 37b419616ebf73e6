"""WaitingQueue: sequences without a slot, in the order in which they are to start. No I/O."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from quire.enginecore.scheduling.sequence import Sequence


class WaitingQueue:
    """fcfs: by arrival, preempted ones in front. priority: by (priority, arrival). Removal from the middle is O(1)."""

    def __init__(self, policy: str):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"no scheduling policy named {policy!r}; there are fcfs and priority")
        self._by_priority = policy == "priority"
        self._queue: OrderedDict[int, Sequence] = OrderedDict()  # by id(); the owner of membership
        self._heap: list[tuple[tuple[int, int], int]] = []  # may hold entries that are gone

    def push(self, seq: Sequence) -> None:
        self._queue[id(seq)] = seq
        if self._by_priority:
            heapq.heappush(self._heap, (seq.order, id(seq)))

    def push_front(self, seq: Sequence) -> None:
        """Back to where it was taken from: the front, or its place by priority."""
        self.push(seq)
        if not self._by_priority:
            self._queue.move_to_end(id(seq), last=False)

    def pop(self) -> Sequence:
        """The next one. Raises KeyError or IndexError if empty."""
        if not self._by_priority:
            return self._queue.popitem(last=False)[1]
        while True:
            order, name = heapq.heappop(self._heap)
            seq = self._queue.get(name)
            if seq is not None and seq.order == order:
                del self._queue[name]
                return seq

    def remove(self, seq: Sequence) -> None:
        del self._queue[id(seq)]
        if len(self._heap) > 2 * len(self._queue) + 64:
            self._heap = [(s.order, name) for name, s in self._queue.items()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._queue.values()))

    def unchanged(self) -> Iterator[Sequence]:
        """As iterating, by arrival, but without a copy: for looks at the first few, while nothing is put in or taken out."""
        return iter(self._queue.values())
