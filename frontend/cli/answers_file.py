"""AnswersFile: the output of `quire run-batch`, which also records its progress: answered requests are not repeated.

A line is written at once, so after a kill only the last one can be torn: it is cut off, and its request is repeated.
"""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec


class BatchFileError(Exception):
    """A file cannot be used; the text is for the user."""


class _Status(msgspec.Struct):
    status_code: int


class _Answer(msgspec.Struct):
    """The fields of an answer that are read again. error.line: the number of an input line that could not be read."""

    custom_id: str | None
    response: _Status | None
    error: Any


_decoder = msgspec.json.Decoder(_Answer)
_BEGIN = b'{"id":"batch_req_'


class AnswersFile:
    """answered: custom_ids. refused: numbers of input lines that were answered as unreadable. num_failed: of both."""

    def __init__(self, path: str) -> None:
        """path: "-" is standard output, which records nothing. Raises BatchFileError."""
        self.answered: set[str] = set()
        self.refused: set[int] = set()
        self.num_failed = 0
        if path == "-":
            self._fd = os.dup(sys.stdout.fileno())
            return
        with ExitStack() as on_failure:
            on_failure.enter_context(_in_words(path))
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            on_failure.callback(os.close, self._fd)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_up(path)
            on_failure.pop_all()

    def _take_up(self, path: str) -> None:
        """Read the existing answers, and cut off a torn last line, which has no newline."""
        if not os.path.isfile(path):
            return  # a pipe or a device
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    break
                if not self._remember(data):
                    raise BatchFileError(f"{path}: line {number} is no answer of a batch: it seems to be another file")
                end += len(data)
        if end == 0 and not _BEGIN.startswith(os.pread(self._fd, len(_BEGIN), 0)):
            raise BatchFileError(f"{path}: this is no file of a batch's answers")
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)

    def _remember(self, data: bytes) -> bool:
        """Record an answer; False if the line is none. Blank lines are ignored."""
        if not data.strip():
            return True
        try:
            answer = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        number = answer.error.get("line") if isinstance(answer.error, dict) else None
        if isinstance(number, int):
            self.refused.add(number)
        elif answer.custom_id is not None:
            self.answered.add(answer.custom_id)
        self.num_failed += answer.response is None or answer.response.status_code != 200
        return True

    def write(self, line: bytes) -> None:
        """Add an answer. Raises OSError."""
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        with suppress(OSError):  # a pipe has nothing to sync
            os.fsync(self._fd)
        os.close(self._fd)


@contextmanager
def _in_words(path: str) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise BatchFileError(f"{path}: another run-batch writes this file") from None
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from None
