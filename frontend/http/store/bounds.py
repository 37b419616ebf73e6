"""Every bound of what a server keeps: files, batches, responses. The one table that store, routes and runner read.

All of it is counted by the store itself (database.py), over all frontends of a server and all API keys. The flag
--max-files-mib sets the bytes of files and batches together.
"""

from typing import Literal, NamedTuple

Kind = Literal["file", "upload", "batch", "response"]

DAY_S = 24 * 3600


class Bound(NamedTuple):
    """Of one kind of record. pool: whose bytes it counts to. evicts: a full store drops the oldest of whoever has most, where
    others are refused. ttl_s: how long a record is kept unless it says otherwise; None: until it is deleted."""

    max_records: int
    pool: Literal["files", "responses"]
    evicts: bool = False
    ttl_s: float | None = None


KINDS: dict[Kind, Bound] = {
    "file": Bound(10_000, "files", ttl_s=30 * DAY_S),
    "upload": Bound(256, "files", ttl_s=3600),  # a file being written; gone an hour after its writer was killed
    "batch": Bound(10_000, "files"),  # its answers too, until they are a file; 30 days from its end
    "response": Bound(50_000, "responses", evicts=True, ttl_s=30 * DAY_S),
}
MAX_RESPONSES_BYTES = 256 << 20
DEFAULT_FILES_MIB = 4096

MAX_FILE_BYTES = 200 << 20  # OpenAI's for a batch's input
MAX_FORM_BYTES = MAX_FILE_BYTES + (64 << 10)  # a file, and what a form has around it
MAX_FORM_PARTS = 32
MAX_PART_HEAD_BYTES = 8 << 10
MAX_FIELD_BYTES = 1 << 10  # of a form's field that is no file
MAX_FILENAME_CHARS = 255
MAX_UPLOADS = 4  # forms of one frontend that are being written at once; what waits has its body in memory
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * DAY_S

MAX_BATCH_LINES = 50_000  # OpenAI's
MAX_INPUT_LINES = 2 * MAX_BATCH_LINES  # blank ones included
MAX_BATCHES_AT_ONCE = 4  # run by one frontend
MAX_ANSWER_BYTES = 16 << 20  # to one line: it is in memory, and copied in one go, until it is written; some 30 ms
MAX_CUSTOM_ID_CHARS = 512
MAX_BATCH_ERRORS = 100  # of an input file, that a batch lists
MAX_WINDOW_S = 30 * DAY_S
