"""Sharing one event loop: long work runs in slices, each in a turn of its own, or in a thread.

No single request may block the loop for others: 5 ms is long. `turn` lets all other tasks run first, including those that also
take turns, so that thousands of requests with long work block the loop no longer than one. `in_thread` is for Python code,
which shares the interpreter with the loop (one thread: several would only compete); `in_native_thread` is for code that runs
without the interpreter's lock. Used by streams and HTTP routes; requests are not known here.
"""

import asyncio
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

SLICE_S = 2e-3
MANY = 2048  # items: a few operations on each take a millisecond
# A thread that runs Python code releases the interpreter's lock after this time. With the default, 5 ms, the loop would wait
# that long after each system call, a few times in each of its turns.
SWITCH_INTERVAL_S = 5e-4

P = ParamSpec("P")
T = TypeVar("T")

_locks: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = weakref.WeakKeyDictionary()
_python = ThreadPoolExecutor(1, "quire-python")
_native = ThreadPoolExecutor(4, "quire-native")


async def turn() -> None:
    """Return in a later turn of the event loop, at most one caller per turn."""
    loop = asyncio.get_running_loop()
    lock = _locks.get(loop)
    if lock is None:
        lock = _locks[loop] = asyncio.Lock()
    async with lock:
        await asyncio.sleep(0)


class Slice:
    """The time that a long loop may run before it waits for its next turn."""

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
    """Run Python code in a thread. It must not touch objects that belong to the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_python, lambda: function(*args, **kwargs))


async def if_many(count: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run Python code that works on so many items: in a thread if they are many."""
    return await in_thread(function, *args, **kwargs) if count > MANY else function(*args, **kwargs)


async def in_native_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run code in a thread that mostly runs without the interpreter's lock."""
    return await asyncio.get_running_loop().run_in_executor(_native, lambda: function(*args, **kwargs))
