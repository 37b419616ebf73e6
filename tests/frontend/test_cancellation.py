"""A task that is cancelled in the very turn in which what it waits for comes is cancelled nevertheless.

asyncio.wait_for loses it then, until Python 3.12: it returns the result as if nobody had cancelled. So it has no place in the
source, and each place that waits with a limit is shown to be right.
"""

import ast
import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.client import utility_calls
from quire.frontend.client.utility_calls import UtilityCalls
from quire.frontend.http.server import StopSignals, _let_notice
from quire.frontend.http.server_state import ServerState
from quire.ipc.messages.frontend import UtilityResult
from quire.ipc.messages.utilities import ResetDone, ResetPrefixCache

ROOT = Path(__file__).parents[2]
Case = tuple[Coroutine[Any, Any, Any], Callable[[], object]]  # what waits, and what lets it go on


class Link:
    """A connected link that takes everything."""

    connected, epoch = True, 1

    def send(self, message: object) -> None:
        pass


def of_notice() -> Case:
    signals = StopSignals()
    return _let_notice(signals, 60.0), signals.now.set


def of_shut_down() -> Case:
    state = ServerState(app=None)  # type: ignore[arg-type]
    state.connections.add(None)  # type: ignore[arg-type]
    state._all_closed = asyncio.Event()
    return state._closed_within(60.0), state._all_closed.set


def of_utility() -> Case:
    calls = UtilityCalls()
    waits = calls.call(Link(), ResetPrefixCache(), ResetDone)  # type: ignore[arg-type]
    return waits, lambda: calls.answered(UtilityResult(1, 1, ResetDone(True)))


@pytest.mark.parametrize("make", [of_notice, of_shut_down, of_utility])
def test_a_cancellation_beside_the_event_is_not_lost(make: Callable[[], Case]) -> None:
    async def run() -> None:
        waits, let_go = make()
        task = asyncio.create_task(waits)
        await asyncio.sleep(0)
        let_go()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.parametrize("make", [of_notice, of_shut_down, of_utility])
def test_what_comes_in_time_is_taken(make: Callable[[], Case]) -> None:
    async def run() -> None:
        waits, let_go = make()
        task = asyncio.create_task(waits)
        await asyncio.sleep(0)
        let_go()
        await task

    asyncio.run(run())


def test_limits_of_time_still_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility_calls, "TIMEOUT_S", 0.0)

    async def run() -> None:
        await _let_notice(StopSignals(), 1e-3)
        state = ServerState(app=None)  # type: ignore[arg-type]
        state.connections.add(None)  # type: ignore[arg-type]
        state._all_closed = asyncio.Event()
        assert not await state._closed_within(1e-3)
        with pytest.raises(utility_calls.EngineDown, match="does not answer"):
            await of_utility()[0]

    asyncio.run(run())


def test_wait_for_is_nowhere_in_the_source() -> None:
    folders = ("ipc", "frontend", "enginecore", "workers")
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.wait_for"
    ]
    assert calls == [], "asyncio.timeout loses no cancellation"
