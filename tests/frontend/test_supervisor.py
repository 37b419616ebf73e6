"""`quire serve`'s own engine: killed, hung, or unable to start for a while, for good, and while we stand still ourselves.

The engine's process is tests/support/fake_engine.py: the end of it, its socket and its heartbeats are real.
"""

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import fake_engine
import psutil
import pytest
from deadlines import DEADLINE_S
from serving import command_of

from quire.frontend import supervisor as supervisor_module
from quire.frontend.cli.engines import Engine
from quire.frontend.cli.serve import EarlyStop
from quire.frontend.client.async_client import AsyncClient
from quire.frontend.launcher import launch_core
from quire.frontend.supervisor import StartFailed
from quire.ipc.config import EngineConfig
from quire.ipc.links.paths import remove_private_directories
from quire.ipc.messages.frontend import Welcome
from quire.ipc.process.restarts import MAX_FAILED_STARTS, MAX_SHORT_LIVES

pytestmark = pytest.mark.slow


class Client(AsyncClient):
    """Says when it is connected, the first time too."""

    def __init__(self, address: str, on_connected: Callable[[], None]) -> None:
        super().__init__(address)
        self._tell_connected = on_connected

    def _on_connected(self, welcome: Welcome) -> None:
        super()._on_connected(welcome)
        self._tell_connected()


class Listener(logging.Handler):
    """Says when something was logged, in the event loop's thread."""

    def __init__(self, on_record: Callable[[], None]) -> None:
        super().__init__()
        self._loop, self._on_record = asyncio.get_running_loop(), on_record

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._on_record)  # after every handler has had it


class Kept:
    """An engine that is kept alive, and a client of it. `why_not`: while this file exists, the engine does not start."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.why_not = folder / "why_not"
        self._caplog = caplog
        self._news = asyncio.Event()  # something was logged, the client is connected, or the keeper has ended

    def run(self, test: "Test", pause_s: float = 0.01, hung_after_s: float = 30.0, start_limit_s: float = 30.0) -> None:
        launch = functools.partial(launch_core, module="fake_engine")
        config = EngineConfig(model=str(self.why_not))
        limits = {"hung_after_s": hung_after_s, "start_limit_s": start_limit_s}
        self.engine = Engine(config, launch=launch, restart_pause_s=pause_s, **limits)
        self.engine.start()
        try:
            asyncio.run(self._run(test))
        finally:
            self.engine.stop()

    async def _run(self, test: "Test") -> None:
        listener = Listener(self._news.set)
        logging.getLogger("quire").addHandler(listener)
        self.keeper = asyncio.create_task(self.engine.keep_alive())
        self.keeper.add_done_callback(lambda _: self._news.set())
        try:
            async with Client(self.engine.address, self._news.set) as self.client:
                await asyncio.wait_for(test(self), DEADLINE_S)
        finally:
            self.keeper.cancel()
            logging.getLogger("quire").removeHandler(listener)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.engine.child.pid, number)

    def count(self, what: str) -> int:
        """How often it was logged."""
        return self._caplog.text.count(what)

    async def said(self, what: str, count: int = 1) -> None:
        await self._until(lambda: self.count(what) >= count)

    async def back(self, count: int = 1) -> None:
        await self.said("the engine is back", count)
        await self._until(lambda: self.client.is_connected)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert not self.keeper.done(), self.keeper.exception()
            self._news.clear()
            await self._news.wait()


Test = Callable[[Kept], Coroutine[None, None, None]]


@pytest.fixture
def kept(tmp_path, monkeypatch, caplog) -> Iterator[Kept]:
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    monkeypatch.setattr(supervisor_module, "_LOOK_S", 0.1)
    caplog.set_level(logging.INFO, "quire")
    yield Kept(tmp_path, caplog)
    remove_private_directories()  # of sockets: tests that count them come later


def test_an_engine_that_was_told_to_stop_is_said_to_be(kept):
    async def test(kept: Kept) -> None:
        kept.kill(signal.SIGTERM)
        await kept.said("the engine was told to stop, by a signal to its own process; requests get 503 until it is back; next")
        await kept.back()

    kept.run(test)


def test_an_engine_that_dies_is_started_again_at_its_address(kept):
    async def test(kept: Kept) -> None:
        epoch, address = kept.client.welcome.epoch, kept.engine.address
        kept.kill()
        await kept.said("the engine ended unexpectedly (signal SIGKILL); requests get 503 until it is back; next start in")
        await kept.back()
        assert kept.client.welcome.epoch != epoch and kept.engine.address == address

    kept.run(test)
    folder = Path(kept.engine.address.removeprefix("ipc://")).parent.parent
    assert folder.is_dir()
    remove_private_directories()
    assert not folder.exists()


def test_an_engine_that_does_not_start_again_is_tried_again(kept):
    async def test(kept: Kept) -> None:
        for count in (1, 2):
            kept.why_not.write_text("the GPU has left")
            kept.kill()
            await kept.said("the engine did not start again (the GPU has left); requests get 503", 2 * count)
            kept.why_not.unlink()
            await kept.back(count)

    kept.run(test, pause_s=0.05)


def test_an_engine_that_is_killed_while_it_starts_is_started_again_at_once(kept):
    async def test(kept: Kept) -> None:
        kept.why_not.write_text("")  # it says nothing and does not end
        kept.kill()
        for count in range(1, MAX_FAILED_STARTS + 1):
            await kept.said("next start in", count)
            while not (starting := [p for p in psutil.Process().children() if "fake_engine" in command_of(p)]):
                await asyncio.sleep(0.0)
            starting[0].kill()
            await kept.said("the engine did not start again (the engine ended while it started (signal SIGKILL)", count)
        kept.why_not.unlink()
        await kept.back()
        assert kept.count("next start in 0 s") == MAX_FAILED_STARTS

    kept.run(test, pause_s=1.0)


def test_an_engine_that_does_not_start_several_times_in_a_row_is_given_up(kept):
    async def test(kept: Kept) -> None:
        kept.why_not.write_text("the GPU has left")
        kept.kill()
        with pytest.raises(StartFailed, match=r"^the engine cannot start again: the GPU has left$"):
            await kept.keeper
        assert kept.count("did not start again") == MAX_FAILED_STARTS - 1

    kept.run(test)


def test_an_engine_that_dies_soon_again_and_again_is_given_up(kept):
    async def test(kept: Kept) -> None:
        for count in range(1, MAX_SHORT_LIVES):
            kept.kill()
            await kept.back(count)
        kept.kill()
        with pytest.raises(StartFailed, match=r"^the engine ended unexpectedly \(signal SIGKILL\), as often before$"):
            await kept.keeper

    kept.run(test)


def test_an_engine_that_hangs_while_it_starts_again_is_tried_again(kept):
    async def test(kept: Kept) -> None:
        kept.why_not.write_text("")  # it says nothing and does not end
        kept.kill()
        await kept.said("the engine did not start again (the engine was not ready within")
        kept.why_not.unlink()
        await kept.back()

    kept.run(test, pause_s=0.05, start_limit_s=1.0)


def test_an_engine_that_hangs_is_replaced(kept):
    async def test(kept: Kept) -> None:
        epoch = kept.client.welcome.epoch
        kept.kill(signal.SIGSTOP)
        await kept.said("the engine ended unexpectedly (it hung, without a sign of life for 1 s, and was killed)")
        await kept.back()
        assert kept.client.welcome.epoch != epoch

    kept.run(test, hung_after_s=1.0)


def test_while_we_stand_still_ourselves_nobody_hangs(kept, monkeypatch):
    async def test(kept: Kept) -> None:
        child, heard = kept.engine.child, asyncio.Queue[int]()
        heartbeats = child.heartbeats

        def look() -> int:
            """The supervisor counts heartbeats."""
            heard.put_nowait(count := heartbeats())
            return count

        monkeypatch.setattr(child, "heartbeats", look)
        child.send_signal(signal.SIGSTOP)  # the whole machine, say
        resumed = time.monotonic() + 2.0
        while time.monotonic() < resumed:
            pass
        child.send_signal(signal.SIGCONT)
        for _ in range(3):
            while not await heard.get():
                pass
        assert kept.engine.child is child and child.poll() is None

    kept.run(test, hung_after_s=1.0)


def test_a_pause_is_over_when_we_are_told_to_stop(kept):
    async def test(kept: Kept) -> None:
        kept.kill()
        await kept.said("next start in 30 s")
        kept.keeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await kept.keeper

    began = time.monotonic()
    kept.run(test, pause_s=30.0)
    assert time.monotonic() - began < 20.0


# ------------------------------------------------------------------------------------------------------ an early stop
class Dropped:
    """Calls what raises in its finalizer, from where an exception goes nowhere."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        try:
            self._call()
        except SystemExit:
            return


def test_a_stop_that_was_dropped_amid_a_finalizer_is_not_lost():
    early = EarlyStop()
    with pytest.raises(SystemExit) as end:
        early()
    assert end.value.code == 0
    early = EarlyStop()
    Dropped(early)
    with pytest.raises(SystemExit):
        early.only_note()


def test_a_stop_before_the_event_loop_listens_is_heard_by_it():
    async def signals(early: EarlyStop) -> bool:
        return early.signals().stop.is_set()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        early = EarlyStop()
        early.only_note()
        assert not asyncio.run(signals(early))
        early()
        assert asyncio.run(signals(early))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
