"""Window: how many lines of batches run at once, so that interactive requests go first.

A line starts only while at least a quarter of the engine's slots is free, for requests that arrive over HTTP, and not while the
engine has requests of others and some of its requests wait. The engine reports its counts twice a second (`Heartbeat`):
requests beyond our own lines are others'. One line of each API key may always run, so that a batch ends even if the server is
always full. The next line is one of the key with the fewest that run.
"""

import asyncio
from collections import Counter
from contextlib import suppress

from quire.frontend.client.client import Client

_LOOK_S = 0.25


class Window:
    """One window per frontend, for all batches that it runs."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._running: Counter[str] = Counter()  # lines, by owner
        self._waiting: Counter[str] = Counter()
        self._running_at_heartbeat = 0
        self._heartbeat_time = 0.0
        self._ended = asyncio.Event()

    async def enter(self, owner: str = "") -> None:
        """Wait until one more line of this owner may run; `leave` when it has ended."""
        self._waiting[owner] += 1
        try:
            while not self._may_enter(owner):
                self._ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._ended.wait()
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]
        self._running[owner] += 1

    def leave(self, owner: str = "") -> None:
        self._look_at_heartbeat()
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._ended.set()

    def _may_enter(self, owner: str) -> bool:
        self._look_at_heartbeat()
        own = self._running[owner]
        if own == 0:
            return True
        return self._has_room() and all(self._running[other] >= own for other in self._waiting if other != owner)

    def _look_at_heartbeat(self) -> None:
        if self._client.heartbeat_time != self._heartbeat_time:
            self._heartbeat_time = self._client.heartbeat_time
            self._running_at_heartbeat = self._running.total()

    def _has_room(self) -> bool:
        self._look_at_heartbeat()
        most, heartbeat, others = max(1, 3 * self._client.welcome.limits.max_num_seqs // 4), self._client.heartbeat, 0
        if heartbeat is not None:
            others = max(0, heartbeat.num_running + heartbeat.num_waiting - self._running_at_heartbeat)
            if others and heartbeat.num_waiting:
                return False
        return others + self._running.total() < most
