"""The longest that anything kept an event loop from its next turn."""

import asyncio
import gc
import time
from typing import Self


class LoopGap:
    """Around what is to be looked at. `worst_s`: between two turns of the loop, in CPU time of the process where that is less
    than what passed, so that other processes do not count."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.freeze()  # as a server does: what the test process holds is not to be looked at
        self._task = asyncio.create_task(self._look())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.unfreeze()
        await asyncio.sleep(0)
        assert self._task is not None
        self._task.cancel()

    async def _look(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now, used = time.perf_counter(), time.process_time()
            self.worst_s = max(self.worst_s, min(now - wall, used - cpu))
            wall, cpu = now, used
