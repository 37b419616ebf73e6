"""`quire reload PID`, and what a running server does about it: `Reloads` waits for the signal and reads the files again.

The signal is SIGUSR2, and SIGHUP too for a server without a controlling terminal (ipc/process/command.py): with one, SIGHUP
says that the terminal was closed, and ends the server.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

from quire.ipc.process.command import RELOAD_SIGNAL, CommandParser, reload_signals

log = logging.getLogger("quire.serve")


def add_reload(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    reload = commands.add_parser(
        "reload",
        help="let a running server read its keys and certificates again",
        description="Let a running `quire serve` or `quire route` read the files of its keys and certificates again. With "
        "several frontends each is replaced by a new process first, and answers its last requests. The server's log says what "
        "became of it.",
        usage="quire reload PID",
    )
    reload.add_argument("pid", type=int, metavar="PID", help="the process of quire serve, which started the others")
    reload.set_defaults(run=_reload, parser=reload)


def _reload(args: argparse.Namespace) -> int:
    try:
        if not _can_reload(args.pid):
            return _failed(f"process {args.pid} is no `quire serve` or `quire route`")
        os.kill(args.pid, RELOAD_SIGNAL)
    except (FileNotFoundError, ProcessLookupError, OverflowError):
        return _failed(f"there is no process {args.pid}")
    except PermissionError:
        return _failed(f"process {args.pid} is another user's")
    return 0


def _can_reload(pid: int) -> bool:
    """Whether a process handles the signal, which would end another one, and is one of ours. Raises OSError."""
    if pid <= 0:
        return False
    with open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    return bool(caught >> (RELOAD_SIGNAL - 1) & 1) and (b"serve" in words or b"route" in words)


def _failed(why: str) -> int:
    print(f"quire reload: {why}", file=sys.stderr)
    return 1


class Reloads:
    """Reloads of one server, one after the other. `asked` may be set from the event loop's thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in reload_signals():
            loop.add_signal_handler(number, self.asked.set)

    async def follow(self, reload: Callable[[], Awaitable[None]]) -> NoReturn:
        """Call `reload` after each signal, until cancelled. It raises ValueError if nothing was changed."""
        while True:
            await self.asked.wait()
            self.asked.clear()
            log.info("reading keys and certificates again")
            try:
                await reload()
            except ValueError as error:
                log.error("nothing was changed: %s", error)


def ignore_reload_signals() -> None:
    """While a server ends: the signal's default action would kill it."""
    for number in reload_signals():
        signal.signal(number, signal.SIG_IGN)
