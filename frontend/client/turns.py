"""Sharing one event loop: what takes long is done a slice at a time, in a turn of its own, or in a thread.

No single request may keep the loop from the others: 5 ms is long. `turn` lets everybody else go first, also others who take
turns, so that thousands of requests with much to do hold the loop no longer than one. `in_thread` is for Python code, which
shares the interpreter with the loop (one thread: several would only push each other aside); `in_native_thread` for code that
works without the interpreter's lock. Used by streams and HTTP routes; nothing here knows what a request is.
"""

import asyncio
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

SLICE_S = 2e-3
# A thread in Python code gives the interpreter up after so long. The default, 5 ms, is what the loop would wait each time that
# it comes back from the system, a few times in each of its turns.
SWITCH_INTERVAL_S = 5e-4

P = ParamSpec("P")
T = TypeVar("T")

_locks: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = weakref.WeakKeyDictionary()
_python = ThreadPoolExecutor(1, "quire-python")
_native = ThreadPoolExecutor(4, "quire-native")


async def turn() -> None:
    """Return in a later turn of the event loop, one in which nobody else returns from here."""
    loop = asyncio.get_running_loop()
    lock = _locks.get(loop)
    if lock is None:
        lock = _locks[loop] = asyncio.Lock()
    async with lock:
        await asyncio.sleep(0)


class Slice:
    """The time that a loop over much may take before it waits for its next turn."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = time.perf_counter() + SLICE_S

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._end

    async def next(self) -> None:
        await turn()
        self._end = time.perf_counter() + SLICE_S


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run Python code beside the loop. It must not touch what belongs to the loop."""
    return await asyncio.get_running_loop().run_in_executor(_python, lambda: function(*args, **kwargs))


async def in_native_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run code that mostly works without the interpreter's lock."""
    return await asyncio.get_running_loop().run_in_executor(_native, lambda: function(*args, **kwargs))
