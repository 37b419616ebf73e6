"""Database: small records by kind and owner, in one SQLite file that all frontends of a server share and that outlives them.

SQLite in WAL mode, from the standard library: a transaction is atomic, wherever a process is killed, and a bound, a page of a
list or a lease is one statement under its lock. With files and fcntl locks we would need a journal of our own. Synchronous is
NORMAL: a power cut may undo the last transactions, but never leaves half of one. The contents of files lie beside it
(contents.py): a content exists only if it has a record. All calls block and are made in one thread (storage.py).
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quire.frontend.http.store.bounds import (
    DAY_S,
    KINDS,
    MAX_KEY_BYTES,
    MAX_KEY_UPLOADS,
    MAX_RESPONSES_BYTES,
    KeyBounds,
    Kind,
)

_VERSION = 1  # of the tables
_LOCK_TIMEOUT_S = 10.0  # a transaction takes milliseconds
_PRAGMAS = ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "journal_size_limit = 16777216")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, tag TEXT NOT NULL,
    size INTEGER NOT NULL, expires REAL, body BLOB NOT NULL, UNIQUE (kind, id));
CREATE INDEX IF NOT EXISTS records_by_owner ON records (kind, owner, seq);
CREATE INDEX IF NOT EXISTS records_by_size ON records (kind, owner, size);
CREATE INDEX IF NOT EXISTS records_by_end ON records (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS leases (id TEXT PRIMARY KEY, holder TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (batch, line));
"""


class StoreFull(Exception):
    """A bound of the store; the text is for the client."""


class Record(NamedTuple):
    id: str
    owner: str
    body: bytes


class Page(NamedTuple):
    bodies: list[bytes]
    has_more: bool


class Database:
    """max_bytes: limit of files and batches together, contents included. clock: seconds since the epoch. key_bounds: an owner's
    own bounds, beneath those of all; None for none."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        key_bounds: Callable[[str], KeyBounds | None] = lambda owner: None,
    ) -> None:
        """Raises sqlite3.Error, OSError, or ValueError for a file of another version."""
        self.clock = clock
        self.path = path
        self._key_bounds = key_bounds
        self._pools = {"files": max_bytes, "responses": MAX_RESPONSES_BYTES}
        with _locked(path.with_suffix(".lock")):  # of two processes that make the file, one would open it half made
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
            self._prepare(path)

    def _prepare(self, path: Path) -> None:
        run = self.connection.execute
        (version,) = run("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ValueError(f"{path} was made by another version of Quire")
        for pragma in _PRAGMAS:
            run(f"PRAGMA {pragma}").fetchall()
        self.connection.executescript(_SCHEMA)
        run(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction with the write lock: no other process writes before it ends."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:  # always raised again
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    # ------------------------------------------------------------------------------------------------------ for callers
    def put(
        self, kind: Kind, owner: str, id: str, body: bytes, *, size: int = 0, tag: str = "", expires_at: float | None = None
    ) -> None:
        """Add a record, or replace the owner's record with this id, which keeps its place in lists.

        size: bytes to count beyond its body. tag: a label that `page` can select by. expires_at: None for the kind's lifetime.
        Raises StoreFull.
        """
        with self.transaction():
            self.add(kind, owner, id, body, size=size, tag=tag, expires_at=expires_at)

    def get(self, kind: Kind, owner: str, id: str) -> bytes | None:
        row = self.connection.execute(
            "SELECT body FROM records WHERE kind = ? AND id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
            (kind, id, owner, self.clock()),
        ).fetchone()
        return None if row is None else row[0]

    def delete(self, kind: Kind, owner: str, id: str) -> bool:
        """Returns whether there was one."""
        with self.transaction() as connection:
            row = connection.execute("DELETE FROM records WHERE kind = ? AND id = ? AND owner = ?", (kind, id, owner))
            return row.rowcount == 1

    def page(
        self, kind: Kind, owner: str, *, after: str | None = None, limit: int, descending: bool = True, tag: str | None = None
    ) -> Page | None:
        """The next `limit` records after the one with the id `after`, in order of creation; None if there is no such record."""
        run, step, order = self.connection.execute, ("<" if descending else ">"), ("DESC" if descending else "ASC")
        where, values = "kind = ? AND owner = ? AND (expires IS NULL OR expires > ?)", [kind, owner, self.clock()]
        if after is not None:
            row = run("SELECT seq FROM records WHERE kind = ? AND owner = ? AND id = ?", (kind, owner, after)).fetchone()
            if row is None:
                return None
            where, values = f"{where} AND seq {step} ?", [*values, row[0]]
        if tag is not None:
            where, values = f"{where} AND tag = ?", [*values, tag]
        rows = run(f"SELECT body FROM records WHERE {where} ORDER BY seq {order} LIMIT ?", (*values, limit + 1)).fetchall()
        return Page([body for (body,) in rows[:limit]], len(rows) > limit)

    def edit(self, kind: Kind, owner: str, id: str, change: Callable[[bytes], bytes], tag: str | None = None) -> bytes | None:
        """Replace a body by change(body), in one transaction, and the tag, unless it is None. Returns the new body, or None if
        there is no such record."""
        with self.transaction() as connection:
            body = self.get(kind, owner, id)
            if body is not None:
                body = change(body)
                connection.execute(
                    "UPDATE records SET body = ?, tag = coalesce(?, tag) WHERE kind = ? AND id = ?", (body, tag, kind, id)
                )
        return body

    def renew(self, kind: Kind, owner: str, id: str, tag: str, until: float) -> bool:
        """Renew the lease of the owner's record with this id and tag, without reading its body. False if there is none."""
        with self.transaction():
            if found := self.has(kind, owner, id, tag):
                self.lease(id, until)
        return found

    def leased_until(self, id: str) -> float:
        """When the lease ends; 0 if there is none."""
        row = self.connection.execute("SELECT until FROM leases WHERE id = ?", (id,)).fetchone()
        return 0.0 if row is None else row[0]

    # --------------------------------------------------------------------------------------- inside another transaction
    def add(
        self,
        kind: Kind,
        owner: str,
        id: str,
        body: bytes,
        *,
        size: int = 0,
        tag: str = "",
        expires_at: float | None = None,
        check_room: bool = True,
    ) -> None:
        """`put`, in the caller's transaction."""
        bound = KINDS[kind]
        if expires_at is None and bound.ttl_s is not None:
            expires_at = self.clock() + bound.ttl_s
        if bound.evicts and size + len(body) > self._pools[bound.pool] // 8:  # it would evict everything, itself included
            raise StoreFull(f"this {kind} is too large to be kept")
        row = (kind, id, owner, tag, size + len(body), expires_at, body)
        done = self.connection.execute(
            "INSERT INTO records (kind, id, owner, tag, size, expires, body) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (kind, id) DO UPDATE SET tag = excluded.tag, size = excluded.size, expires = excluded.expires,"
            " body = excluded.body WHERE owner = excluded.owner",
            row,
        )
        if done.rowcount != 1:
            raise ValueError("this id is another owner's")
        if check_room:
            self.check_room(kind, owner)

    def has(self, kind: Kind, owner: str, id: str, tag: str) -> bool:
        """Whether there is the owner's record of this id and tag."""
        values = kind, id, owner, tag
        row = self.connection.execute("SELECT 1 FROM records WHERE kind = ? AND id = ? AND owner = ? AND tag = ?", values)
        return row.fetchone() is not None

    def lease(self, id: str, until: float) -> None:
        """Lease a record without naming a holder: only its maker renews it."""
        self.connection.execute("INSERT OR REPLACE INTO leases VALUES (?, '', ?)", (id, until))

    def check_room(self, kind: Kind, owner: str) -> None:
        """Evict until the bounds hold again, after something of the owner's was added; for kinds that do not evict, raise
        StoreFull."""
        bound = KINDS[kind]
        if not bound.evicts and (excess := self._excess_of_key(kind, owner)):
            raise StoreFull(excess)
        while excess := self._excess(kind):
            if not bound.evicts:
                raise StoreFull(excess)
            self._evict(kind)

    def _excess(self, kind: Kind) -> str | None:
        bound, run = KINDS[kind], self.connection.execute
        (count,) = run("SELECT count(*) FROM records WHERE kind = ?", (kind,)).fetchone()
        if count > bound.max_records:
            return f"this server keeps {bound.max_records} {kind}s at most: delete some first"
        kinds = [name for name, other in KINDS.items() if other.pool == bound.pool]
        marks = ", ".join("?" * len(kinds))
        (size,) = run(f"SELECT coalesce(sum(size), 0) FROM records WHERE kind IN ({marks})", kinds).fetchone()
        if size > self._pools[bound.pool]:
            return f"this server keeps {self._pools[bound.pool] >> 20} MiB of {bound.pool} at most: delete some first"
        return None

    def _excess_of_key(self, kind: Kind, owner: str) -> str | None:
        bounds, run = self._key_bounds(owner), self.connection.execute
        if bounds is None:
            return None
        most = MAX_KEY_UPLOADS if kind == "upload" else bounds.max_records
        (count,) = run("SELECT count(*) FROM records WHERE kind = ? AND owner = ?", (kind, owner)).fetchone()
        if count > most:
            return f"this API key keeps {most} {kind}s at most: delete some first"
        most = min(MAX_KEY_BYTES, self._pools["files"] // 2) if bounds.max_bytes is None else bounds.max_bytes
        kinds = [name for name, other in KINDS.items() if other.pool == "files"]
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT coalesce(sum(size), 0) FROM records WHERE kind IN ({marks}) AND owner = ?"
        (size,) = run(query, (*kinds, owner)).fetchone()
        return f"this API key keeps {most >> 20} MiB of files at most: delete some first" if size > most else None

    def _evict(self, kind: Kind) -> None:
        """Delete the oldest record of the owner with the most bytes, so that an owner with few keeps them."""
        run = self.connection.execute
        (owner,) = run(
            "SELECT owner FROM records WHERE kind = ? GROUP BY owner ORDER BY sum(size) DESC LIMIT 1", (kind,)
        ).fetchone()
        run(
            "DELETE FROM records WHERE seq IN (SELECT seq FROM records WHERE kind = ? AND owner = ? ORDER BY seq LIMIT 1)",
            (kind, owner),
        )

    # -------------------------------------------------------------------------------------------------------- tidying up
    def purge(self) -> list[str]:
        """Remove expired records; returns the ids of those that have contents to remove."""
        with self.transaction() as connection:
            rows = connection.execute(
                "DELETE FROM records WHERE expires IS NOT NULL AND expires <= ? RETURNING kind, id", (self.clock(),)
            ).fetchall()
            connection.execute("DELETE FROM leases WHERE until <= ?", (self.clock() - DAY_S,))  # of removed records
        if rows:
            self.shrink()
        return [id for kind, id in rows if kind in ("file", "upload")]

    def shrink(self) -> None:
        """Return the space of deleted records to the file system."""
        self.connection.execute("PRAGMA incremental_vacuum").fetchall()

    def without_record(self, ids: list[str]) -> list[str]:
        """The ids among these that no record has. Records are made before their contents, so such contents are garbage."""
        known = {id for (id,) in self.connection.execute("SELECT id FROM records WHERE kind IN ('file', 'upload')")}
        return [id for id in ids if id not in known]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
