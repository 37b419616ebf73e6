"""Kinds of KV groups, written as their windows."""

from quire.ipc.messages.workers import FullAttention, KVGroupKind, SlidingWindow

FULL = (FullAttention(),)


def kinds_of(windows: tuple[int, ...]) -> tuple[KVGroupKind, ...]:
    """windows: of each group; 0 sees everything."""
    return tuple(SlidingWindow(window) if window else FullAttention() for window in windows)
