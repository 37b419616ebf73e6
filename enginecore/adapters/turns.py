"""LoadTurns: at most MOST_LOADS loads of adapters on demand are under way for one API key, through all frontends. No I/O.

Without a bound, a client that asks for thousands of names would hold up the loads of all others, as folders are read one after
the other. Loads beyond the bound wait in the order in which they came. Adapters owns it.

Unnested: calls, each of which may let the next one begin, without a stack that grows with their number.
"""

from collections import deque
from collections.abc import Callable

MOST_LOADS = 2

Over = Callable[[], None]
Work = Callable[[Over], None]


class Unnested:
    """A call that is asked for within another one begins after that has returned, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_at_work = False

    def __call__(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._is_at_work:
            return
        self._is_at_work = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._is_at_work = False


class LoadTurns:
    """most_waiting: loads that may wait, of all keys together."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._under_way: dict[str, int] = {}  # by key
        self._waiting: dict[str, deque[Work]] = {}
        self._unnested = Unnested()
        self.num_waiting = 0

    def begin(self, key: str, work: Work) -> bool:
        """Call `work` when it is its turn, perhaps now; it must call what it is given once it is over. False: too many wait."""
        if self._under_way.get(key, 0) < MOST_LOADS:
            self._under_way[key] = self._under_way.get(key, 0) + 1
            work(lambda: self._over(key))
            return True
        if self.num_waiting >= self._most_waiting:
            return False
        self._waiting.setdefault(key, deque()).append(work)
        self.num_waiting += 1
        return True

    def _over(self, key: str) -> None:
        if waiting := self._waiting.get(key):
            work = waiting.popleft()
            self.num_waiting -= 1
            if not waiting:
                del self._waiting[key]
            return self._unnested(lambda: work(lambda: self._over(key)))
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        return None

    def check(self) -> None:
        """Assert that only keys with all their loads under way have some that wait."""
        assert self.num_waiting == sum(map(len, self._waiting.values())) and all(self._waiting.values())
        assert all(self._under_way[key] == MOST_LOADS for key in self._waiting)
        assert all(0 < count <= MOST_LOADS for count in self._under_way.values())
