"""Grammar masks of a step on the plan ring: pairs of a row and its mask, in as many records as they need.

They follow the plan, which lists their rows in its section `mask_rows`. The worker samples once records have named all these
rows. A record without masks says that its rows may be any token, or that they get no mask. The next plan says the latter of all
rows that are left: their result is NO_TOKEN, and the core ends their requests. The ring decides this, not a clock, so that all
ranks decide alike. Masks lie in the record, or in the ring's area (mask_area.py), at a place that the record names.

Written by the core (enginecore/workers.py), read by each worker (workers/records.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.ipc.step.plan_ring import RingCorrupt
from quire.ipc.step.sections import MASK, MASKS_ALLOW, MASKS_ANY_TOKEN, MASKS_IN_AREA, MASKS_NONE, STEP_MASK

MASK_RECORD_WORDS = (
    1 << 20
)  # most words of a record, and size of a worker's buffers: it copies one record while the core writes the next
_STEP, _NUM_ROWS, _KIND = (MASK.at[name] for name in ("step", "num_rows", "kind"))

_NO_AREA = np.zeros(0, np.int32)

# (int32 [n], rows of a step; int32 [n, words], bit set = allowed, or None: everything is allowed)
RowsAndMasks = tuple[np.ndarray, np.ndarray | None]


class MaskRecord(NamedTuple):
    step: int
    rows: np.ndarray  # int32 [n], rows of the step
    masks: np.ndarray | None  # int32 [n, words], bit set = allowed
    kind: int  # MASKS_*


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: a bit for each token, and one after them, by which llguidance says whether the output may end."""
    return vocab_size // 32 + 1


def _header(step: int, num_rows: int, kind: int) -> np.ndarray:
    header = np.zeros(MASK.width, np.int32)
    header[_STEP], header[_NUM_ROWS], header[_KIND] = step & STEP_MASK, num_rows, kind
    return header


def mask_records(step: int, rows: np.ndarray, masks: np.ndarray, max_words: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Records of at most `max_words`, as parts for `PlanRing.write_parts`: rows int32 [n], masks int32 [n, words].

    Raises ValueError if not even one mask fits.
    """
    at_once = _masks_at_once(masks.shape[1], max_words)
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        yield _header(step, len(some), MASKS_ALLOW), some, masks[first : first + at_once]


def area_records(step: int, rows: np.ndarray, place: int, width: int) -> Iterator[tuple[np.ndarray, ...]]:
    """The same of masks that lie in the ring's area, one behind the other from the word `place` on, `width` words each.

    A record names no more masks than it could carry: a worker may have to copy them into the same buffers.
    """
    at_once = _masks_at_once(width, MASK_RECORD_WORDS)
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        yield _header(step, len(some), MASKS_IN_AREA), some, np.asarray((place + first * width, width), np.int32)


def _masks_at_once(width: int, max_words: int) -> int:
    """Most rows of a record with masks of this width."""
    at_once = (min(max_words, MASK_RECORD_WORDS) - MASK.width) // (1 + width)
    if at_once < 1:
        raise ValueError(f"a mask of {width} words does not fit a record of {max_words}")
    return at_once


def no_masks_record(step: int, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """The parts of a record that says that these rows get no mask."""
    return _header(step, len(rows), MASKS_NONE), rows


def any_token_record(step: int, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """The parts of a record that says that these rows may be any token."""
    return _header(step, len(rows), MASKS_ANY_TOKEN), rows


def decode_masks(words: np.ndarray, area: np.ndarray = _NO_AREA) -> MaskRecord:
    """Read a record: views into `words` and the ring's area. Raises RingCorrupt if masks are not inside the area."""
    n = int(words[_NUM_ROWS])
    rows, rest = words[MASK.width : MASK.width + n], words[MASK.width + n :]
    kind = int(words[_KIND])
    if kind == MASKS_IN_AREA:
        place, width = rest.tolist()
        if place < 0 or width < 1 or place + n * width > area.size:
            raise RingCorrupt(f"{n} masks of {width} words from {place} on are not in an area of {area.size}")
        return MaskRecord(int(words[_STEP]), rows, area[place : place + n * width].reshape(n, width), kind)
    return MaskRecord(int(words[_STEP]), rows, rest.reshape(n, -1) if kind == MASKS_ALLOW else None, kind)
