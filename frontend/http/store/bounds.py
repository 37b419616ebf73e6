"""The bounds of everything that a server stores: files, batches, responses. The store, routes and runner read this table.

The store itself counts (database.py), over all frontends of a server and all API keys. --max-files-mib sets the bytes of files
and batches together.
"""

from typing import Literal, NamedTuple

Kind = Literal["file", "upload", "batch", "response"]

DAY_S = 24 * 3600


class Bound(NamedTuple):
    """The bounds for one kind of record. pool: the pool that its bytes count to. evicts: a full store drops the oldest record
    of the owner with the most bytes, instead of refusing new ones. ttl_s: default lifetime; None: until it is deleted."""

    max_records: int
    pool: Literal["files", "responses"]
    evicts: bool = False
    ttl_s: float | None = None


class KeyBounds(NamedTuple):
    """The bounds for one API key, beneath those for all. max_records: of files, and of batches. max_bytes: of files and batches
    together; None: the less of MAX_KEY_BYTES and half of what all may have."""

    max_records: int = 1000
    max_bytes: int | None = None


MAX_KEY_BYTES = 1 << 30
KINDS: dict[Kind, Bound] = {
    "file": Bound(10_000, "files", ttl_s=30 * DAY_S),
    "upload": Bound(256, "files", ttl_s=3600),  # a file being written; it expires after an hour if its writer was killed
    "batch": Bound(10_000, "files"),  # includes its answers until they are a file; kept for 30 days from its end
    "response": Bound(50_000, "responses", evicts=True, ttl_s=30 * DAY_S),
}
MAX_RESPONSES_BYTES = 256 << 20
DEFAULT_FILES_MIB = 4096

MAX_FILE_BYTES = 200 << 20  # OpenAI's limit for a batch's input
MAX_FORM_BYTES = MAX_FILE_BYTES + (64 << 10)  # a file and the rest of the form
MAX_FORM_PARTS = 32
MAX_PART_HEAD_BYTES = 8 << 10
MAX_FIELD_BYTES = 1 << 10  # of a form's field that is not a file
MAX_FILENAME_CHARS = 255
MAX_UPLOADS = 4  # forms that one frontend writes at once; each has its body in memory
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * DAY_S

MAX_BATCH_LINES = 50_000  # OpenAI's limit
MAX_INPUT_LINES = 2 * MAX_BATCH_LINES  # blank ones included
MAX_BATCHES_AT_ONCE = 4  # of one API key, run by one frontend
MAX_BATCHES_OF_ALL = 16  # of all keys: each has the ids of 50,000 lines in memory
MAX_KEY_UPLOADS = 64  # reservations of one API key
MAX_ANSWER_BYTES = 16 << 20  # to one line: it is in memory until it is written, by one copy of some 30 ms
MAX_CUSTOM_ID_CHARS = 512
MAX_BATCH_ERRORS = 100  # in an input file that a batch lists
MAX_WINDOW_S = 30 * DAY_S
