"""Logging of every process of ours: one line a record on stderr, with time, process and level; nothing of requests' texts.

A process goes on when nobody reads what it writes: a closed stdout or stderr is /dev/null, and what a pipe without a reader is
given is dropped.
"""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def set_up_logging(level: int = logging.INFO) -> None:
    """Once the configuration is known, before anything is opened that would take a closed stream's descriptor."""
    _open_what_is_closed()
    if sys.stdout is sys.__stdout__:  # not what a caller of ours has put in its place
        sys.stdout = _dropping(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _dropping(2, sys.stderr)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s[{os.getpid()}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("quire")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def _open_what_is_closed() -> None:
    """Also for our children, which inherit it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: fd


def _dropping(fd: int, old: TextIO | None) -> TextIO:
    encoding, errors = (old.encoding, old.errors) if old is not None else ("utf-8", "replace")
    if old is not None:
        with suppress(OSError):
            old.flush()
    return io.TextIOWrapper(io.BufferedWriter(_Dropping(fd, "w", closefd=False)), encoding, errors, line_buffering=True)


class _Dropping(io.FileIO):
    """A file whose reader may go away."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes
