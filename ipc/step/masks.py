"""Grammar masks of a step on the plan ring: pairs of a row and its mask, in as many records as they need.

They follow the plan, which lists their rows in its section `mask_rows`. The worker samples once records have named all these
rows. A record without masks says that its rows may be any token, or that they get no mask. The next plan says the latter of all
rows that are left: their result is NO_TOKEN, and the core ends their requests. The ring decides this, not a clock, so that all
ranks decide alike. Masks lie in the record, or in the ring's area (mask_area.py), at a place that the record names.

In a step with windows a mask is of a row and a place in its window, and is named by the two (`mask_names`). All masks of a row
are in one record. A place of the row without a mask may be any token. A mask that allows nothing ends the window before it.

Written by the core (enginecore/workers.py), read by each worker (workers/records.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.ipc.step.plan_ring import RingCorrupt
from quire.ipc.step.sections import MASK, MASKS_ALLOW, MASKS_ANY_TOKEN, MASKS_IN_AREA, MASKS_NONE, MAX_WINDOW, STEP_MASK

MASK_RECORD_WORDS = (
    1 << 20
)  # most words of a record, and size of a worker's buffers: it copies one record while the core writes the next
_STEP, _NUM_ROWS, _KIND = (MASK.at[name] for name in ("step", "num_rows", "kind"))

_NO_AREA = np.zeros(0, np.int32)

# (int32 [n], rows of a step, or with windows names of masks; int32 [n, words], bit set = allowed, or None: everything is
# allowed in the rows)
RowsAndMasks = tuple[np.ndarray, np.ndarray | None]


class MaskRecord(NamedTuple):
    step: int
    rows: np.ndarray  # int32 [n], rows of the step; with windows, names of masks if there are masks
    masks: np.ndarray | None  # int32 [n, words], bit set = allowed
    kind: int  # MASKS_*


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: a bit for each token, and one after them, by which llguidance says whether the output may end."""
    return vocab_size // 32 + 1


def mask_names(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Names of masks in a step with windows, int32 [n]."""
    names: np.ndarray = rows * MAX_WINDOW + places
    return names


def rows_and_places(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reverse of `mask_names`."""
    return names // MAX_WINDOW, names % MAX_WINDOW


def _header(step: int, num_rows: int, kind: int) -> np.ndarray:
    header = np.zeros(MASK.width, np.int32)
    header[_STEP], header[_NUM_ROWS], header[_KIND] = step & STEP_MASK, num_rows, kind
    return header


def mask_records(
    step: int, rows: np.ndarray, masks: np.ndarray, max_words: int, windows: bool = False
) -> Iterator[tuple[np.ndarray, ...]]:
    """Records of at most `max_words`, as parts for `PlanRing.write_parts`: rows int32 [n], masks int32 [n, words].

    windows: rows are names of masks, those of a row one after the other. Raises ValueError if a row's masks do not fit.
    """
    for some in _parts(rows, _masks_at_once(masks.shape[1], max_words), windows):
        yield _header(step, some.stop - some.start, MASKS_ALLOW), rows[some], masks[some]


def area_records(
    step: int, rows: np.ndarray, place: int, width: int, windows: bool = False
) -> Iterator[tuple[np.ndarray, ...]]:
    """The same of masks that lie in the ring's area, one behind the other from the word `place` on, `width` words each.

    A record names no more masks than it could carry: a worker may have to copy them into the same buffers.
    """
    for some in _parts(rows, _masks_at_once(width, MASK_RECORD_WORDS), windows):
        at = np.asarray((place + some.start * width, width), np.int32)
        yield _header(step, some.stop - some.start, MASKS_IN_AREA), rows[some], at


def _parts(rows: np.ndarray, at_once: int, windows: bool) -> Iterator[slice]:
    """Parts of at most `at_once` masks; with windows, none ends within a row."""
    first = 0
    while first < len(rows):
        end = min(first + at_once, len(rows))
        if windows and end < len(rows):
            of_others = (rows[first:end] // MAX_WINDOW != rows[end] // MAX_WINDOW).nonzero()[0]
            end = first + int(of_others[-1]) + 1 if len(of_others) else first
            if end == first:
                raise ValueError(f"the masks of a row's window do not fit a record of {at_once}")
        yield slice(first, end)
        first = end


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
