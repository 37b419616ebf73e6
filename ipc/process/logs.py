"""Logging of every process: one line per record on stderr, with time, process and level, never with texts of requests.
With --log-format json a line is an object with these as its fields.

A process continues if its output cannot be written: a closed stdout or stderr becomes /dev/null, and output to a pipe without a
reader, a full disk or a closed terminal is dropped.
"""

import io
import json
import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def set_up_logging(level: str = "info", form: str = "text") -> None:
    """level, form: as --log-level and --log-format name them.

    Call it once the configuration is known, before anything is opened that would get a closed stream's descriptor.
    """
    _open_what_is_closed()
    if sys.stdout is sys.__stdout__:  # not replaced by a caller
        sys.stdout = _dropping(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _dropping(2, sys.stderr)
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)s %(name)s[{os.getpid()}] %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    root = logging.getLogger("quire")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class _JsonLines(logging.Formatter):
    """A record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}"
        fields = {"time": time, "level": record.levelname, "logger": record.name, "pid": record.process}
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _open_what_is_closed() -> None:
    """Open /dev/null for closed standard descriptors, also for children, which inherit them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor is fd


def _dropping(fd: int, old: TextIO | None) -> TextIO:
    encoding, errors = (old.encoding, old.errors) if old is not None else ("utf-8", "replace")
    if old is not None:
        with suppress(OSError):
            old.flush()
    return io.TextIOWrapper(io.BufferedWriter(_Dropping(fd, "w", closefd=False)), encoding, errors, line_buffering=True)


class _Dropping(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            if (taken := super().write(data)) is not None:  # None: it is nonblocking and full
                return taken
        return memoryview(data).nbytes
