"""Event loop lag: a task of the frontend (server.py) that measures how late its timer fires."""

import asyncio
import time

from quire.frontend.http.api.metrics.metrics import Histogram

INTERVAL_S = 0.1  # anything that blocks the loop for longer is seen


async def watch_lag(lag: Histogram) -> None:
    """Observe the lag, in seconds, until cancelled."""
    while True:
        due = time.monotonic() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag.observe(max(0.0, time.monotonic() - due))
