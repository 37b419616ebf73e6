"""Grammar masks of a step on the plan ring: pairs of a row and its mask, in as many records as they need.

They follow the plan whose section `mask_rows` names their rows; the worker samples when every such row was named by a
record. A record without masks says of its rows that they may be any token, or that they get none, and the next plan says so
of all that are left: then the row's result is NO_TOKEN, and the core ends its request. It is the ring that decides, not a
clock, so that all ranks decide alike.

Written by the core (enginecore/workers.py), read by each worker (workers/records.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.ipc.step.sections import MASK, MASKS_ALLOW, MASKS_FREE, MASKS_NONE, STEP_MASK

MASK_RECORD_WORDS = 1 << 20  # of one record at most: a worker copies one while the core writes the next, in buffers so large
_STEP, _NUM_ROWS, _KIND = (MASK.at[name] for name in ("step", "num_rows", "kind"))

# int32 [n], rows of a step; int32 [n, words], bit set = allowed, or None: everything is
RowsAndMasks = tuple[np.ndarray, np.ndarray | None]


class MaskRecord(NamedTuple):
    step: int
    rows: np.ndarray  # int32 [n], rows of the step
    masks: np.ndarray | None  # int32 [n, words], bit set = allowed
    kind: int  # MASKS_*


def _header(step: int, num_rows: int, kind: int) -> np.ndarray:
    header = np.zeros(MASK.width, np.int32)
    header[_STEP], header[_NUM_ROWS], header[_KIND] = step & STEP_MASK, num_rows, kind
    return header


def mask_records(step: int, rows: np.ndarray, masks: np.ndarray, max_words: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Records of at most `max_words`, as parts for `PlanRing.write_parts`: rows int32 [n], masks int32 [n, words].

    Raises ValueError if not even one mask fits.
    """
    at_once = (min(max_words, MASK_RECORD_WORDS) - MASK.width) // (1 + masks.shape[1])
    if at_once < 1:
        raise ValueError(f"a mask of {masks.shape[1]} words does not fit a record of {max_words}")
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        yield _header(step, len(some), MASKS_ALLOW), some, masks[first : first + at_once]


def no_masks_record(step: int, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """The parts of a record that says that these rows get no mask."""
    return _header(step, len(rows), MASKS_NONE), rows


def free_record(step: int, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """The parts of a record that says that these rows may be any token."""
    return _header(step, len(rows), MASKS_FREE), rows


def decode_masks(words: np.ndarray) -> MaskRecord:
    """Read a record; views into `words`."""
    n = int(words[_NUM_ROWS])
    rows, rest = words[MASK.width : MASK.width + n], words[MASK.width + n :]
    kind = int(words[_KIND])
    return MaskRecord(int(words[_STEP]), rows, rest.reshape(n, -1) if kind == MASKS_ALLOW else None, kind)
