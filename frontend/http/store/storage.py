"""Storage: the records and files of the routes and the batch runner, for asyncio: every disk access is made in a thread.

One thread accesses the database, four access contents; calls wait for them in order. The store is opened at the first call, so
a server that stores nothing has no file. A route that stores JSON records, such as /v1/responses, needs only `put`, `get`,
`delete` and `list`. Their owner is the digest of the request's API key (`Request.owner`); no owner sees another's records.
"""

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.batch_queue import BatchQueue, Result, commit_file, read_answers
from quire.frontend.http.store.bounds import DEFAULT_FILES_MIB, MAX_UPLOADS, KeyBounds, Kind
from quire.frontend.http.store.contents import Contents, FilesFolder
from quire.frontend.http.store.database import Database, Page, StoreFull

log = logging.getLogger("quire.http")

T = TypeVar("T")
_LOG_AGAIN_S = 60.0  # for the same error
RECORDS = "records.sqlite3"
_NUM_FILE_THREADS = 4
_PIECE = 256 << 10  # bytes of one read of a content; some 100 us


def new_record_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def check_folder(folder: Path) -> None:
    """Open or make the store in the folder as a server would, so that its operator sees an error at the start.

    Raises OSError, ValueError.
    """
    path = folder / RECORDS
    try:
        Database(path, 0).close()
    except sqlite3.Error as error:
        raise ValueError(f"{path}: {error}") from None
    Contents(folder)


class Storage:
    """folder: shared by all frontends of a server; None: private to this object. max_bytes: limit of files and batches.
    key_bounds: an owner's own bounds, or None."""

    def __init__(
        self,
        folder: str | None = None,
        max_bytes: int = DEFAULT_FILES_MIB << 20,
        clock: Callable[[], float] = time.time,
        key_bounds: Callable[[str], KeyBounds | None] = lambda owner: None,
    ) -> None:
        self.clock = clock
        self.batch_made = asyncio.Event()  # or cancelled, by this frontend: wakes its batch runner
        self._folder = folder
        self._max_bytes = max_bytes
        self._key_bounds = key_bounds
        self._num_uploads = 0
        self._logged_error, self._log_again_at = "", 0.0  # the last error logged
        self._private: FilesFolder | None = None
        self._open: tuple[Database, Contents, BatchQueue] | None = None
        self._database_thread = ThreadPoolExecutor(1, "quire-store")
        self._file_threads = ThreadPoolExecutor(_NUM_FILE_THREADS, "quire-files")

    async def close(self) -> None:
        await self._in(self._database_thread, self._close)
        self._database_thread.shutdown(wait=False)
        self._file_threads.shutdown(wait=False)

    def _close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None
        if self._private is not None:
            self._private.close()

    # ---------------------------------------------------------------------------------------------------------- records
    async def put(
        self, kind: Kind, owner: str, id: str, body: bytes, *, tag: str = "", expires_at: float | None = None
    ) -> None:
        """Store a record, or replace the owner's record with this id. expires_at: None for the kind's lifetime. Raises
        ApiError."""
        await self.database(lambda db: db.put(kind, owner, id, body, tag=tag, expires_at=expires_at))

    async def get(self, kind: Kind, owner: str, id: str) -> bytes | None:
        return await self.database(lambda db: db.get(kind, owner, id))

    async def delete(self, kind: Kind, owner: str, id: str) -> bool:
        """Returns whether there was one. A file's content is removed with it."""
        found = await self.database(lambda db: db.delete(kind, owner, id))
        if found and kind == "file":
            await self.files(lambda contents: contents.remove([id]))
        return found

    async def list(
        self, kind: Kind, owner: str, *, after: str | None = None, limit: int, descending: bool = True, tag: str | None = None
    ) -> Page | None:
        """A page of records, the latest first; None if no record has the id `after`."""
        return await self.database(lambda db: db.page(kind, owner, after=after, limit=limit, descending=descending, tag=tag))

    async def edit(
        self, kind: Kind, owner: str, id: str, change: Callable[[bytes], bytes], tag: str | None = None
    ) -> bytes | None:
        """Replace a record by change(record), and its tag, unless it is None; returns the new one, or None if there is no
        record. `change` runs in a thread."""
        return await self.database(lambda db: db.edit(kind, owner, id, change, tag))

    async def purge(self) -> None:
        """Remove expired records and their contents."""
        ids = await self.database(lambda db: db.purge())
        if ids:
            await self.files(lambda contents: contents.remove(ids))

    # ------------------------------------------------------------------------------------------------------------ files
    @contextmanager
    def upload_slot(self) -> Iterator[None]:
        """Hold one of MAX_UPLOADS slots during an upload, which has its body in memory. Raises ApiError 503 if none is free."""
        if self._num_uploads >= MAX_UPLOADS:
            raise ApiError(503, "Too many files are being uploaded at once.", code="overloaded", retry_after_s=1)
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    async def upload(self, owner: str, result: Result, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a content and make it the owner's file. Raises ApiError; then nothing of it is stored."""
        await self.reserve(owner, result.id, result.size)
        try:
            await self.files(lambda contents: contents.write(result.id, pieces))
            await self.database(lambda db: _commit(db, owner, result))
        except BaseException:  # includes cancellation, as the client has gone
            await asyncio.shield(self.forget(owner, result.id))
            raise

    async def reserve(self, owner: str, id: str, size: int) -> None:
        """Reserve room for a content that is about to be written. The reservation of a killed writer expires after an hour."""
        await self.database(lambda db: db.put("upload", owner, id, b"", size=size))

    async def forget(self, owner: str, id: str) -> None:
        """Remove a reservation and what was written for it."""
        if await self.database(lambda db: db.delete("upload", owner, id)):  # else it is a file already, and stays
            await self.files(lambda contents: contents.remove([id]))

    async def open_content(self, id: str) -> int:
        """A file descriptor, which the caller closes. Raises FileNotFoundError."""
        fd = await self._in(self._file_threads, lambda: self._opened()[1].open(id))
        if fd is None:
            raise FileNotFoundError(id)
        return fd

    async def pieces(self, fd: int, size: int) -> AsyncIterator[bytes]:
        """Yield a content in pieces, each read when it is asked for."""
        offset = 0
        while offset < size and (piece := await self._in(self._file_threads, partial(os.pread, fd, _PIECE, offset))):
            offset += len(piece)
            yield piece

    async def write_answers(self, batch: str, ok: bool, id: str) -> int:
        """Write the answers of a batch as a content, for which room is reserved; returns its size in bytes."""

        def write() -> int:
            database, contents, _ = self._opened()
            contents.remove([id])
            with closing(read_answers(database.path, batch, ok)) as answers:  # type: ignore[type-var]
                return contents.write(id, answers)

        return await self._in(self._file_threads, write)

    # ---------------------------------------------------------------------------------------------------------- threads
    async def database(self, work: Callable[[Database], T]) -> T:
        """Run `work` in the database's thread. Raises ApiError."""
        return await self._in(self._database_thread, lambda: work(self._opened()[0]))

    async def queue(self, work: Callable[[BatchQueue], T]) -> T:
        return await self._in(self._database_thread, lambda: work(self._opened()[2]))

    async def files(self, work: Callable[[Contents], T]) -> T:
        """Run `work` in a thread for contents. The database must have been used before."""
        return await self._in(self._file_threads, lambda: work(self._opened()[1]))

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            done = await asyncio.get_running_loop().run_in_executor(threads, work)
        except StoreFull as error:
            raise ApiError(400, f"{error}.", code="storage_full") from error
        except (sqlite3.Error, OSError) as error:
            self._log_error(error)
            raise ApiError(503, "The server's store cannot be used now.", code="storage_error", retry_after_s=5) from error
        return done

    def _log_error(self, error: sqlite3.Error | OSError) -> None:
        """Log the same error at most once a minute: a full disk fails every call."""
        why, now = getattr(error, "strerror", None) or str(error), time.monotonic()
        if why != self._logged_error or now >= self._log_again_at:
            self._logged_error, self._log_again_at = why, now + _LOG_AGAIN_S
            log.error("the store cannot be used (%s): %s", self._folder or "in the folder for temporary files", why)

    def _opened(self) -> tuple[Database, Contents, BatchQueue]:
        """The open store. The database's thread must call this first, as the connection belongs to that thread."""
        if self._open is None:
            if self._folder is None and self._private is None:
                self._private = FilesFolder(None)
            folder = Path(self._folder) if self._private is None else self._private.path  # type: ignore[arg-type]
            database, contents = Database(folder / RECORDS, self._max_bytes, self.clock, self._key_bounds), Contents(folder)
            contents.remove(database.without_record(contents.ids()))
            self._open = database, contents, BatchQueue(database)
        return self._open


def _commit(database: Database, owner: str, result: Result) -> None:
    with database.transaction():
        commit_file(database, owner, result)
