"""Supervisor: one child process kept running. It is watched, and started again when it has ended or hangs, after a pause.

What the process is and how it starts is said by a `Supervised` (the engine and each frontend of `quire serve`: cli/serve.py,
cli/frontends.py), and when it is given up by a `Restarts`. Ending the process in order is its owner's business: cancel
`keep_alive`, in whatever it is, and then stop what runs.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from quire.ipc.process.children import KILL_WAIT_S, Child, how_it_ended
from quire.ipc.process.restarts import Restarts

log = logging.getLogger("quire.serve")

_LOOK_S = 1.0  # how often heartbeats are counted

T = TypeVar("T")


class StartFailed(Exception):
    """A process could not be started; the text is for the user."""


class Supervised(Protocol):
    """What a Supervisor keeps running. name: as in "the engine"; while_down: what the user must expect until it is back."""

    name: str
    while_down: str

    @property
    def child(self) -> Child:
        """The process that runs, or that ran last."""

    def on_down(self) -> None:
        """It has ended, or was not started: the next start comes after a pause."""

    async def start_again(self) -> None:
        """Start another; returns when it is ready. Raises StartFailed."""


class Supervisor:
    """hung_after_s: how long a process may go without a heartbeat while this one runs; None for one that sends none."""

    def __init__(self, process: Supervised, restarts: Restarts, hung_after_s: float | None = None) -> None:
        self._process = process
        self._restarts = restarts
        self._hung_after_s = hung_after_s

    async def keep_alive(self) -> NoReturn:
        """From a process that is ready until cancelled. Raises StartFailed when starting is given up."""
        while True:
            self._restarts.ready(time.monotonic())
            child = self._process.child
            how = await self._watch(child)
            child.close()
            await self._start_again(how)
            log.info("%s is back", self._process.name)

    async def _start_again(self, what: str) -> None:
        why = ""  # of a start that failed
        while (pause_s := self._restarts.ended(time.monotonic())) is not None:
            self._process.on_down()
            log.error("%s %s; %s; next start in %.0f s", self._process.name, what, self._process.while_down, pause_s)
            await asyncio.sleep(pause_s)
            try:
                return await self._process.start_again()
            except StartFailed as error:
                why = str(error)
                what = f"did not start again ({why})"
        raise StartFailed(f"{self._process.name} {f'cannot start again: {why}' if why else f'{what}, as often before'}")

    async def _watch(self, child: Child) -> str:
        """Wait for the end of a child, which comes by our hand if it hangs; how it ended."""
        ended, silent_looks = asyncio.create_task(until_ended(child)), 0
        try:
            # Counted in looks, not in time: if this process stood still, with the whole machine, the child was not silent.
            while not await _done_within(ended, _LOOK_S):
                silent_looks = 0 if child.heartbeats() else silent_looks + 1
                if self._hung_after_s is not None and silent_looks * _LOOK_S >= self._hung_after_s:
                    child.send_signal(signal.SIGKILL)
                    await _done_within(ended, KILL_WAIT_S)
                    how = "was killed" if child.poll() is not None else "cannot even be killed"
                    return f"ended unexpectedly (it hung, without a sign of life for {self._hung_after_s:.0f} s, and {how})"
            if (code := child.poll()) == 0:  # by a signal to it alone: ours come when nobody watches any more
                return "was told to stop, by a signal to its own process"
            return f"ended unexpectedly ({(child.receive(0.0) or {}).get('error') or how_it_ended(code)})"
        finally:
            ended.cancel()


async def until_ended(child: Child) -> None:
    """Wait for the end of a child."""
    if child.poll() is not None or child.fileno() < 0:  # closed: nobody waits for it any more
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(child.fileno())


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but at exit nobody waits for the thread; a process that it may be starting ends with us."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # belongs to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are exiting
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name="quire-restart", daemon=True).start()
    return await done


async def _done_within(task: "asyncio.Task[None]", seconds: float) -> bool:
    done, _ = await asyncio.wait((task,), timeout=seconds)
    return bool(done)
