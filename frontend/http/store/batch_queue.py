"""BatchQueue: which frontend runs which batch, and its answers so far. It uses database.py's tables and its thread.

A frontend that runs a batch holds a lease and renews it; when the lease expires, another frontend takes the batch. Answers are
rows, one for each line of the input, written in a transaction that checks the lease: a frontend that was stopped for a while
adds nothing, no line is answered twice, none is torn, and a successor knows what is left. In the end all rows become files at
once.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from quire.frontend.http.store.database import Database, Record

LEASE_S = 15.0
ACTIVE, DONE = "active", "done"  # tags of batches


class Answer(NamedTuple):
    """One line of an output file. ok: it goes to the output file, else to the error file. body: without its newline."""

    line: int
    ok: bool
    body: bytes


class Result(NamedTuple):
    """A file with its contents already written; `commit_file` adds its record."""

    id: str
    body: bytes  # the file's record
    size: int
    expires_at: float
    purpose: str


class BatchQueue:
    def __init__(self, database: Database) -> None:
        self._db = database

    def take(self, holder: str, not_of: Collection[str] = ()) -> Record | None:
        """Lease a batch that no frontend runs to the holder for LEASE_S: one of the owner with the fewest that run, its oldest.

        not_of: owners; their batches are left to others."""
        now = self._db.clock()
        with self._db.transaction() as connection:
            # a lease that ends too late to be possible: the clock was set back
            found = connection.execute(
                "SELECT records.id FROM records LEFT JOIN leases ON leases.id = records.id LEFT JOIN ("
                " SELECT owner, count(*) AS num FROM records JOIN leases ON leases.id = records.id"
                " WHERE kind = 'batch' AND tag = ? AND until > ? AND until <= ? GROUP BY owner) AS running"
                " ON running.owner = records.owner"
                " WHERE kind = 'batch' AND tag = ? AND (holder IS NULL OR until <= ? OR until > ?)"
                f" AND records.owner NOT IN ({', '.join('?' * len(not_of))}) ORDER BY coalesce(num, 0), seq LIMIT 1",
                (ACTIVE, now, now + LEASE_S, ACTIVE, now, now + LEASE_S, *not_of),
            ).fetchone()
            if found is None:
                return None
            row = connection.execute("SELECT id, owner, body FROM records WHERE kind = 'batch' AND id = ?", found).fetchone()
            connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (row[0], holder, now + LEASE_S))
        return Record(*row)

    def give_back(self, holder: str) -> None:
        """End the holder's leases, so that other frontends can take its batches at once."""
        self._db.connection.execute("DELETE FROM leases WHERE holder = ?", (holder,))

    def answered(self, id: str) -> dict[int, bool]:
        """Line -> whether it succeeded."""
        return dict(self._db.connection.execute("SELECT line, ok FROM answers WHERE batch = ?", (id,)).fetchall())

    def save(self, id: str, holder: str, answers: Sequence[Answer], change: Callable[[bytes], bytes]) -> bytes | None:
        """Add answers, change the batch's record and renew the lease. None if the lease is another's now.

        Raises StoreFull; then nothing is changed.
        """
        with self._db.transaction() as connection:
            record = self._held(id, holder)
            if record is None:
                return None
            body = change(record.body)
            connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", [(id, *answer) for answer in answers])
            size = sum(len(answer.body) for answer in answers)
            connection.execute("UPDATE records SET body = ?, size = size + ? WHERE kind = 'batch' AND id = ?", (body, size, id))
            connection.execute("UPDATE leases SET until = ? WHERE id = ?", (self._db.clock() + LEASE_S, id))
            if answers:
                self._db.check_room("batch", record.owner)
        return body

    def finish(
        self, id: str, holder: str, results: Sequence[Result], change: Callable[[bytes], bytes], expires_at: float
    ) -> bool:
        """Turn the answers' rows into files; the batch is done, kept until expires_at. False if the lease is another's now."""
        with self._db.transaction() as connection:
            record = self._held(id, holder)
            if record is None:
                return False
            connection.execute("DELETE FROM answers WHERE batch = ?", (id,))
            connection.execute("DELETE FROM leases WHERE id = ?", (id,))
            body = change(record.body)
            connection.execute(
                "UPDATE records SET body = ?, size = ?, tag = ?, expires = ? WHERE kind = 'batch' AND id = ?",
                (body, len(body), DONE, expires_at, id),
            )
            for result in results:
                commit_file(self._db, record.owner, result, check_room=False)  # there was room for the rows
        self._db.shrink()
        return True

    def _held(self, id: str, holder: str) -> Record | None:
        row = self._db.connection.execute(
            "SELECT records.id, owner, body FROM records JOIN leases ON leases.id = records.id"
            " WHERE kind = 'batch' AND records.id = ? AND holder = ?",
            (id, holder),
        ).fetchone()
        return None if row is None else Record(*row)


def commit_file(database: Database, owner: str, result: Result, *, check_room: bool = True) -> None:
    """Inside a transaction: turn an upload into a file. Raises StoreFull, or LookupError if the upload has expired."""
    gone = database.connection.execute("DELETE FROM records WHERE kind = 'upload' AND id = ?", (result.id,))
    if gone.rowcount != 1:
        raise LookupError("the upload was given up")
    database.add(
        "file",
        owner,
        result.id,
        result.body,
        size=result.size,
        tag=result.purpose,
        expires_at=result.expires_at,
        check_room=check_room,
    )


def read_answers(database: Path, batch: str, ok: bool) -> Iterator[bytes]:
    """The answers of one kind, as lines, in the order of the input. Any thread may call this."""
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT body FROM answers WHERE batch = ? AND ok = ? ORDER BY line"
        for (body,) in connection.execute(query, (batch, ok)):
            yield body + b"\n"
