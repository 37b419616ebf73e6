"""Window: how many lines of batches run at once, so that interactive requests go first.

A line starts while nobody waits in the engine and at least a quarter of its slots is free: what comes over HTTP meanwhile finds
one. The engine says how it is doing twice a second (`Beat`); between, our own lines are counted on. One line may always run: a
batch beside a server that is always full ends some day.
"""

import asyncio
from contextlib import suppress

from quire.frontend.client.async_client import AsyncClient

_LOOK_S = 0.25


class Window:
    """Of one frontend, for all batches that it runs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._running = 0
        self._running_at_beat = 0
        self._beat_time = 0.0
        self._ended = asyncio.Event()

    async def enter(self) -> None:
        """Wait until one more line may run; `leave` when it has ended."""
        while not self._has_room():
            self._ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _LOOK_S)
        self._running += 1

    def leave(self) -> None:
        self._running -= 1
        self._ended.set()

    def _has_room(self) -> bool:
        client = self._client
        if client.beat_time != self._beat_time:
            self._beat_time, self._running_at_beat = client.beat_time, self._running
        if self._running == 0:
            return True
        most = max(1, 3 * client.welcome.limits.max_num_seqs // 4)
        if client.beat is None:
            return self._running < most
        in_engine = client.beat.num_running + self._running - self._running_at_beat
        return in_engine < most and self._running < most and client.beat.num_waiting == 0
