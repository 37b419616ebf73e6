"""The longest time that an event loop was blocked."""

import asyncio
import gc
import os
import time
from typing import Self

TICK_S = 1e-3
MOST_S = 0.1  # twice what is promised, for slow cores: what is in one piece where it should not be takes 0.3 s and more


class LoopGap:
    """Around what is to be looked at. `worst_s`: between two turns of the loop, less what its thread waited for a core, and in
    CPU time of the process where that is less than what passed, so that other processes do not count."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.looked = asyncio.Event()  # set at every look
        self._timer: asyncio.TimerHandle | None = None
        self._schedstat = -1
        self._looked = 0.0, 0.0  # wall clock without the waits, and CPU time

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.freeze()  # as a server does: what the test process holds is not to be looked at
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._looked = self._now()
        self._look()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._look()  # what lies between the last turn and this one counts, too
        assert self._timer is not None
        self._timer.cancel()
        os.close(self._schedstat)

    def _now(self) -> tuple[float, float]:
        """One call that gives up the interpreter's lock: another thread may keep it for 5 ms each time (opening the file anew
        was four of them, and up to 20 ms of the meter's own)."""
        without_a_core_s = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        return time.perf_counter() - without_a_core_s, time.process_time()

    def _look(self) -> None:
        (wall, cpu), self._looked = self._looked, self._now()
        self.worst_s = max(self.worst_s, min(self._looked[0] - wall, self._looked[1] - cpu))
        self.looked.set()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._look)
