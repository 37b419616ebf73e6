"""`quire reload PID` asks a running server to read its files again; what the server does about it is in reloads.py.

The signal is SIGUSR2, and SIGHUP too for a server without a controlling terminal (ipc/process/command.py): with one, SIGHUP
says that the terminal was closed, and ends the server.
"""

import argparse
import os
import sys

from quire.ipc.process.command import RELOAD_SIGNAL, CommandParser


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
