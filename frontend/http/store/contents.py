"""Contents: the bytes of files, in a folder beside the database, under names that we generate; and the folder itself.

A content is named by the id of its record, 32 random hex digits, never by anything from a request: an id from the wire is
looked up in the database first. A record is written before its content and removed before it, so a content without a record was
left by a killed process, and is removed at the next start. Without --files-dir the folder is private and removed with the
server; a folder left by a killed server is recognized by its free lock. All calls block (storage.py calls them in threads).
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

_PREFIX = "quire-files-"
_LOCK = "server.lock"
_PIECE = 1 << 20  # bytes of one write: other Python threads run between two writes


class FilesFolder:
    """The folder of one server, locked while the server lives. path None: a private folder, removed by `close`."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError, or ValueError if another server uses the folder."""
        self._is_private = path is None
        if path is None:
            _remove_stale_folders(Path(tempfile.gettempdir()))
            path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise ValueError(f"{path} is in use by another server") from None

    def close(self) -> None:
        """May be called again."""
        if self._lock_fd >= 0:
            if self._is_private:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def _remove_stale_folders(base: Path) -> None:
    """Remove the private folders of servers that were killed."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone, not ours, or its server lives (BlockingIOError)
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
                continue
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


class Contents:
    """The folder of contents. Every id is a record's id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "contents"
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, id: str, pieces: Iterable[bytes | memoryview]) -> int:
        """Write a content that has a record already, and sync it to disk; returns its size in bytes. Raises OSError and leaves
        nothing: on a full disk, its record could not be removed before the content is."""
        with open(self._path(id), "xb", opener=_private) as file, ExitStack() as on_failure:
            on_failure.callback(self.remove, [id])
            size = _write(file, pieces)
            on_failure.pop_all()
        return size

    def open(self, id: str) -> int | None:
        """A descriptor to read from, which outlives a removal; None if there is no such content. Raises OSError."""
        try:
            return os.open(self._path(id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def remove(self, ids: Iterable[str]) -> None:
        for id in ids:
            with suppress(OSError):  # removed already; else it is removed at the next start
                os.unlink(self._path(id))

    def ids(self) -> list[str]:
        return os.listdir(self._folder)

    def _path(self, id: str) -> Path:
        return self._folder / id


def _write(file: BinaryIO, pieces: Iterable[bytes | memoryview]) -> int:
    size = 0
    for piece in pieces:
        for begin in range(0, len(piece), _PIECE):
            file.write(piece[begin : begin + _PIECE])
        size += len(piece)
    file.flush()
    os.fsync(file.fileno())
    return size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
