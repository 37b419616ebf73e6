"""Garbage collection that stops no step: the daemon calls it before its loop, the benchmark of admission before it measures."""

import gc

# allocations to a young collection, young ones to a middle one, middle ones to a full one: with Python's own 10 for the last,
# 8,192 requests that come at once are all looked through again and again, 15 to 26 ms each time
THRESHOLDS = (700, 10, 10_000)


def keep_pauses_short() -> None:
    """Leave what start-up made out of every collection (7 ms), and look through all the rest rarely.

    Requests are freed by their reference counts; the core makes few cycles, which may wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
