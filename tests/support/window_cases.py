"""Steps of recurrent layers whose decode rows have windows, for tests of their kernels."""

from typing import NamedTuple

import torch
from recurrent_cases import Row, on, rows_of

from quire.kernels.recurrent.rows import Rows, Windows

NUM_INPUTS = 60  # that are kept, in two halves
BASE = 30


class WindowRow(NamedTuple):
    """A decode row with a window: its state, its tokens, what is kept of it, and where its state is to be left."""

    own: int
    tokens: int
    kept: int = 0
    first: int = 0
    position: int = 10  # tokens of the sequence before
    keep_at: int = 0
    keep_state: int = 0


def window_rows_of(
    decode: list[WindowRow], chunks: list[Row], *, padding: int = 0, knows: bool = True, base: int = BASE
) -> Rows:
    """Slots are the rows' numbers from 1 on; that of padding is 0."""
    spans = [Row(row.tokens, row.own, row.own, 0, row.position) for row in decode]
    rows = rows_of([], [*spans, *chunks], padding=padding)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    slots = [*range(1, len(decode) + 1), *([0] * (len(chunks) + padding))]
    of_slots = (ints(0, *(row[i] for row in decode)) for i in (2, 3, 4, 5, 6))
    known = (len(rows.own) if not chunks else len(decode)) if knows else None
    windows = Windows(ints(*slots), *of_slots, ints(base))
    return rows._replace(decode_limit=ints(len(decode)), num_decode_rows=known, windows=windows)


def keeping(rows: Rows, *inputs: torch.Tensor) -> Rows:
    assert rows.windows is not None
    return rows._replace(windows=rows.windows._replace(inputs=inputs))


def windows_on(device: str, rows: Rows) -> Rows:
    assert rows.windows is not None
    inputs = tuple(x.to(device) for x in rows.windows.inputs)
    return on(device, rows)._replace(windows=on(device, rows.windows)._replace(inputs=inputs))


DECODE = [
    WindowRow(3, tokens=4, kept=3, first=5),
    WindowRow(1, tokens=1),
    WindowRow(4, tokens=16, kept=16, first=8, position=70, keep_at=64, keep_state=8),  # leaves its state after 10 of them
    WindowRow(2, tokens=2, kept=2, first=24, position=64, keep_at=64, keep_state=10),  # and after the last
    WindowRow(9, tokens=0, kept=3, first=1, position=66, keep_at=64, keep_state=9),  # only applies one, and ends there
    WindowRow(5, tokens=0, position=128, keep_at=128, keep_state=11),  # is there, and has none to apply
    WindowRow(6, tokens=3, kept=1, first=0, position=130, keep_at=200, keep_state=7),  # is not there yet
]
WRITTEN = [1, 2, 3, 4, 5, 6, 9]
CASES = {
    "decode": window_rows_of(DECODE, [], padding=24),
    "mixed": window_rows_of(DECODE, [Row(70, 12), Row(2, 13, 1, 7)], padding=2, base=0),
    "device-knows": window_rows_of(DECODE, [Row(3, 12)], padding=2, knows=False),
}
CASES["mixed"].windows.first_kept.add_(30)  # type: ignore[union-attr]
