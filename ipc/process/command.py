"""Shared by the commands `quire` and `enginecore`: one-line errors for wrong flags, hints that can be typed as shown, signals.

Called by the command lines and by code that prints a command for the user to type. Standard library only.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Prints errors in one line, with a hint at --help; argparse would print the whole usage. Flags cannot be abbreviated.

    place: the place of the words, if it is not the command line, e.g. "FILE, line 3: ".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.place = ""

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "a switch takes no value, in a file true or false, but got")
        self.exit(2, f"{self.prog}: {self.place}{message}; see '{as_started(self.prog)} --help'\n")

    def actions(self) -> dict[str, argparse.Action]:
        """Flag -> action."""
        return {flag: action for action in self._actions for flag in action.option_strings}


def as_started(command: str) -> str:
    """A command, e.g. "quire chat", as it can be typed here: with this process's path, unless PATH leads to it."""
    name, *words = command.split()
    path = sys.argv[0]
    if os.path.basename(path) == name and os.path.realpath(path) != os.path.realpath(shutil.which(name) or ""):
        name = shlex.quote(path)
    elif getattr(sys.modules["__main__"].__spec__, "name", "") == f"{name}.__main__":  # python -m quire
        name = f"{shlex.quote(sys.orig_argv[0])} -m quire"
    return " ".join([name, *words])


RELOAD_SIGNAL = signal.SIGUSR2  # by which `quire reload` asks a server to read its files again


def reload_signals() -> list[signal.Signals]:
    """Signals that ask a server to read its files again: without a controlling terminal SIGHUP, too, unless it is ignored."""
    hangup = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and not has_terminal()
    return [RELOAD_SIGNAL, *([signal.SIGHUP] if hangup else [])]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, by which SIGHUP comes when it is closed."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[4] != b"0"
    except (OSError, IndexError):
        return True


def stop_signals() -> list[signal.Signals]:
    """Signals that end a process in order: SIGTERM, SIGINT, and a closed terminal's SIGHUP, unless it is ignored (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """While a command's modules are imported, Ctrl-C ends it at once: there is nothing to clean up yet (a prespawned child
    ends with us), and the usual exception crashes the process if it is raised while an extension module initializes."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
