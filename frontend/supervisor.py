"""Supervisor: keeps one child process running. It watches the child and, after a pause, restarts it when it has ended or hangs.

A `Supervised` describes the process and starts it (the engine and each frontend of `quire serve`: cli/serve.py,
cli/frontends.py); a `Restarts` decides when to give up. The owner ends the process: it cancels `keep_alive`, at any point, and
then stops the child.
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

_LOOK_S = 1.0  # interval of the checks for heartbeats

T = TypeVar("T")


class StartFailed(Exception):
    """A process could not be started; the text is for the user."""


class Supervised(Protocol):
    """The process that a Supervisor keeps running. name: as in "the engine"; while_down: what to expect meanwhile."""

    name: str
    while_down: str

    @property
    def child(self) -> Child:
        """The current process, or the last one."""

    def on_down(self) -> None:
        """Called when it has ended or could not start; the next start comes after a pause."""

    async def start_again(self) -> None:
        """Start a new process; returns when it is ready. Raises StartFailed."""


class Supervisor:
    """hung_after_s: how long the process may send no heartbeat while we run; None for a process that sends none."""

    def __init__(self, process: Supervised, restarts: Restarts, hung_after_s: float | None = None) -> None:
        self._process = process
        self._restarts = restarts
        self._hung_after_s = hung_after_s

    async def keep_alive(self) -> NoReturn:
        """Watch a process that is ready, and restart it, until cancelled. Raises StartFailed when restarts are given up."""
        while True:
            self._restarts.ready(time.monotonic())
            child = self._process.child
            how = await self._watch(child)
            child.close()
            await self._start_again(how)
            log.info("%s is back", self._process.name)

    async def _start_again(self, what: str) -> None:
        why = ""  # of the last failed start
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
        """Wait until the child ends, and kill it if it hangs; returns how it ended."""
        ended, silent_looks = asyncio.create_task(until_ended(child)), 0
        try:
            # Silence is counted in checks, not in seconds: if the whole machine stood still, the child did not hang.
            while not await _done_within(ended, _LOOK_S):
                silent_looks = 0 if child.heartbeats() else silent_looks + 1
                if self._hung_after_s is not None and silent_looks * _LOOK_S >= self._hung_after_s:
                    child.send_signal(signal.SIGKILL)
                    await _done_within(ended, KILL_WAIT_S)
                    how = "was killed" if child.poll() is not None else "cannot even be killed"
                    return f"ended unexpectedly (it hung, without a sign of life for {self._hung_after_s:.0f} s, and {how})"
            if (code := child.poll()) == 0:  # by a signal to it alone: our own stop cancels this function first
                return "was told to stop, by a signal to its own process"
            return f"ended unexpectedly ({(child.receive(0.0) or {}).get('error') or how_it_ended(code)})"
        finally:
            ended.cancel()


async def until_ended(child: Child) -> None:
    """Wait for the end of a child."""
    if child.poll() is not None or child.fileno() < 0:  # closed already
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(child.fileno())


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but the exit does not wait for the thread; a process that it is starting ends with us."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # raised by the `await` below
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are exiting
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name="quire-restart", daemon=True).start()
    return await done


async def _done_within(task: "asyncio.Task[None]", seconds: float) -> bool:
    done, _ = await asyncio.wait((task,), timeout=seconds)
    return bool(done)
