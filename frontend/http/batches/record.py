"""A batch as clients see it and as it is stored: OpenAI's object, and its status changes.

    validating -> in_progress -> finalizing -> completed        failed: its input cannot be read, or the store is full
             \\________ cancelling -> cancelled                 expired: its completion_window is over

Changes are functions from one stored body to the next, applied inside a transaction (store/database.py, `edit`).
"""

from collections.abc import Callable

import msgspec

from quire.frontend.http.store.bounds import DAY_S

KEPT_S = 30 * DAY_S  # after its end
RUNNING = ("validating", "in_progress", "finalizing")
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds since the epoch."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None


_decoder = msgspec.json.Decoder(Batch)


def decode(body: bytes) -> Batch:
    return _decoder.decode(body)


def changed(body: bytes, **fields: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(decode(body), **fields))


def to_status(status: str, now: int, **fields: object) -> Callable[[bytes], bytes]:
    """A change to another status, with its time. A batch that is being cancelled changes only to an ended status."""

    def change(body: bytes) -> bytes:
        if decode(body).status == "cancelling" and status not in ENDED:
            return changed(body, **fields)
        return changed(body, status=status, **{f"{status}_at": now}, **fields)

    return change


def cancelling(now: int) -> Callable[[bytes], bytes]:
    """The change for a client's cancel; it leaves a batch alone that has ended or is being cancelled already."""

    def change(body: bytes) -> bytes:
        return changed(body, status="cancelling", cancelling_at=now) if decode(body).status in RUNNING else body

    return change
