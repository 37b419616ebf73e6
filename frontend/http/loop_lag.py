"""How late the event loop is: a timer that measures by how much it was kept waiting. One of a frontend's tasks (server.py)."""

import asyncio
import time

from quire.frontend.http.api.metrics.metrics import Histogram

INTERVAL_S = 0.1  # whatever holds the loop for longer is seen


async def watch_lag(lag: Histogram) -> None:
    """Until cancelled."""
    while True:
        due = time.monotonic() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag.observe(max(0.0, time.monotonic() - due))
