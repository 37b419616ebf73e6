"""The tokens of decode rows with windows, in turns: the paths of a CPU take a token of each row at once, as they do without
windows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire.kernels.recurrent.rows import KeptRow


class Turn(NamedTuple):
    """A token of each of some rows."""

    rows: torch.Tensor  # int64 [r], of decode rows
    at: torch.Tensor  # int64 [r], index of the token, in the step or among the kept ones
    positions: torch.Tensor  # int32 [r], in its sequence


def own_turns(rows: list[KeptRow]) -> Iterator[Turn]:
    """The tokens of this step."""
    for place in range(max((row.stop - row.start for row in rows), default=0)):
        yield _turn(
            [(i, row.start + place, row.position + place) for i, row in enumerate(rows) if row.start + place < row.stop]
        )


def kept_turns(rows: list[KeptRow], states: torch.Tensor, taken: torch.Tensor) -> Iterator[Turn]:
    """The kept tokens, of which the caller puts each turn's states into `taken`, in the dtype of `states`, before the next one.

    states [N, ...] of a layer: they are left where rows leave them. taken [R, ...]: those of all decode rows."""
    for count in range(1 + max((row.end - row.first for row in rows), default=0)):
        if count:
            yield _turn([(i, row.first + count - 1, _position(row, count)) for i, row in enumerate(rows) if _has(row, count)])
        for i, row in enumerate(rows):
            if row.leaves == count:
                states[row.keep_state] = taken[i]


def _has(row: KeptRow, count: int) -> bool:
    return row.first + count <= row.end


def _position(row: KeptRow, count: int) -> int:
    """The place of a row's kept token."""
    return row.position - row.num_kept + count - 1


def _turn(tokens: list[tuple[int, int, int]]) -> Turn:
    rows, at, positions = zip(*tokens, strict=True)
    return Turn(torch.tensor(rows), torch.tensor(at), torch.tensor(positions, dtype=torch.int32))
