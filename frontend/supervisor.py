"""Supervisor: keeps one child process running. It watches the child and restarts it when it has ended or hangs.

A `Supervised` describes the process and starts it (the engine and each frontend of `quire serve`: cli/engines.py,
cli/frontends.py); a `Restarts` decides on the pause and when to give up. A process that leaves, because a signal told it to
stop, is replaced while it ends. The owner ends the process: it cancels `keep_alive`, at any point, and then stops the child.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, TypeVar

from quire.ipc.process.children import KILL_WAIT_S, Child, how_it_ended
from quire.ipc.process.restarts import Restarts

log = logging.getLogger("quire.serve")

SERVED = "served"  # a child's message, once it has served a request
_LOOK_S = 1.0  # interval of the checks for heartbeats
_TOLD_TO_STOP = "was told to stop, by a signal to its own process"

T = TypeVar("T")


class StartFailed(Exception):
    """A process could not be started; the text is for the user. from_outside: a signal from outside ended it."""

    def __init__(self, text: str, from_outside: bool = False) -> None:
        super().__init__(text)
        self.from_outside = from_outside


class Supervised(Protocol):
    """The process that a Supervisor keeps running. name: as in "the engine"; while_down: what to expect meanwhile."""

    name: str
    while_down: str

    @property
    def child(self) -> Child:
        """The current process, or the last one."""

    def on_message(self, child: Child, said: dict[str, str]) -> bool:
        """A process of ours has said something; returns whether it leaves. Then the owner closes it when it has ended."""

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
            how, leaves = await self._watch(child)
            if leaves:
                self._restarts.served()  # it has not failed: its successor starts at once
            else:
                child.close()
            if self._process.child is child:  # else it was replaced already
                await self._start_again(how)
                log.info("%s is back", self._process.name)

    async def _start_again(self, what: str) -> None:
        why, from_outside = "", False  # of the last failed start
        while (pause_s := self._restarts.ended(time.monotonic(), from_outside)) is not None:
            self._process.on_down()
            log.error("%s %s; %s; next start in %.0f s", self._process.name, what, self._process.while_down, pause_s)
            await asyncio.sleep(pause_s)
            try:
                return await self._process.start_again()
            except StartFailed as error:
                why, from_outside = str(error), error.from_outside
                what = f"did not start again ({why})"
        raise StartFailed(f"{self._process.name} {f'cannot start again: {why}' if why else f'{what}, as often before'}")

    async def _watch(self, child: Child) -> tuple[str, bool]:
        """Wait until the child ends or leaves, and kill it if it hangs; returns what it did, and whether it leaves."""
        errors, leaves = list[str](), asyncio.Event()

        def take(said: dict[str, str]) -> None:
            if SERVED in said:
                self._restarts.served()
            errors.extend(said[name] for name in ("error",) if name in said)
            if self._process.on_message(child, said):
                leaves.set()

        with _messages(child, take):
            left = asyncio.create_task(leaves.wait())
            hung = await watch_until_ended(child, self._hung_after_s, left)
            left.cancel()
            if leaves.is_set() or child.poll() == 0:  # by a signal to it alone: our own stop cancels this function first
                return _TOLD_TO_STOP, leaves.is_set()
            while (said := child.receive(0.0)) is not None:  # its last words
                take(said)
        return f"ended unexpectedly ({hung or (errors[-1] if errors else how_it_ended(child.poll()))})", False


async def watch_until_ended(child: Child, hung_after_s: float | None, also: "asyncio.Task[Any] | None" = None) -> str:
    """Wait until the child has ended, or `also` is done. One without a heartbeat for hung_after_s is killed, and described."""
    ended, silent_looks = asyncio.create_task(until_ended(child)), 0
    waited_for = {ended} if also is None else {ended, also}
    try:
        # Silence is counted in checks, not in seconds: if the whole machine stood still, the child did not hang.
        while not (await asyncio.wait(waited_for, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            silent_looks = 0 if child.heartbeats() else silent_looks + 1
            if hung_after_s is not None and silent_looks * _LOOK_S >= hung_after_s:
                child.send_signal(signal.SIGKILL)
                await asyncio.wait((ended,), timeout=KILL_WAIT_S)
                how = "was killed" if child.poll() is not None else "cannot even be killed"
                return f"it hung, without a sign of life for {hung_after_s:.0f} s, and {how}"
        return ""
    finally:
        ended.cancel()


@contextlib.contextmanager
def _messages(child: Child, take: Callable[[dict[str, str]], None]) -> Iterator[None]:
    """Pass on what the child says, as it comes."""
    loop, control = asyncio.get_running_loop(), child.control_fileno()

    def read() -> None:
        if (said := child.receive(0.0)) is None:
            loop.remove_reader(control)  # the child is ending
        else:
            take(said)

    loop.add_reader(control, read)
    try:
        yield
    finally:
        loop.remove_reader(control)


async def until_ended(child: Child) -> None:
    """Wait for the end of a child."""
    if child.poll() is not None or child.fileno() < 0:  # closed already
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    fd = os.dup(child.fileno())  # of this caller alone: the child may be closed, or be waited for by another
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


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
