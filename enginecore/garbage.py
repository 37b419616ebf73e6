"""Garbage collection that stops no step: the daemon calls it before its loop, the benchmark of admission before it measures."""

import gc

# allocations per young collection, young ones per middle one, middle ones per full one. With Python's own 10 for the last,
# 8,192 requests that come at once are all traversed again and again, 15 to 26 ms each time.
THRESHOLDS = (700, 10, 10_000)


def keep_pauses_short() -> None:
    """Exclude the objects made at start-up from every collection (7 ms), and make full collections rare.

    Requests are freed by their reference counts; the core makes few cycles, and these may wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
