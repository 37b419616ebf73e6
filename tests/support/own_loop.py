"""Async tests of frontend clients: a loop of its own for each test, and turns of it until a condition holds."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fake_core import FakeCore


def in_own_loop(test: Callable[..., Awaitable[None]], run: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """What pytest is to call for `test`: it runs `run` with the fixtures that test has behind its first two arguments."""

    @functools.wraps(test)
    def start(**kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(run(**kwargs), 100))

    start.__signature__ = inspect.Signature(list(inspect.signature(test).parameters.values())[2:])  # type: ignore[attr-defined]
    return start


async def until(condition: Callable[[], object]) -> None:
    """Turns of the loop until something is so; every event that matters here wakes the loop."""
    while not condition():
        await asyncio.sleep(0)


async def heard(core: FakeCore, kind: type) -> Any:
    return await asyncio.to_thread(core.next, kind)
