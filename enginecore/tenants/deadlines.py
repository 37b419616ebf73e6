"""Deadlines: which requests must have ended by when. The core's loop asks in each turn for those that are overdue. No clock."""

import heapq
from collections.abc import Callable

COMPACT_AT = 1024  # entries; requests that have ended leave theirs behind until then


class Deadlines:
    """runs: whether a request, by (owner, request id), has not ended."""

    def __init__(self, runs: Callable[[int, int], bool]) -> None:
        self._runs = runs
        self._heap: list[tuple[float, int, int]] = []  # (deadline, owner, request id)
        self._compact_at = COMPACT_AT

    def add(self, owner: int, request_id: int, deadline: float) -> None:
        """deadline: seconds of the clock that `overdue` is asked by."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if self._runs(entry[1], entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(COMPACT_AT, 2 * len(self._heap))
        heapq.heappush(self._heap, (deadline, owner, request_id))

    def overdue(self, now: float) -> list[tuple[int, int]]:
        """(owner, request id) of those past their deadline; each is returned once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, owner, request_id = heapq.heappop(self._heap)
            if self._runs(owner, request_id):
                found.append((owner, request_id))
        return found

    def __len__(self) -> int:
        return len(self._heap)
