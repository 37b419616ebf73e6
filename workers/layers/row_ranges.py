"""RowRanges: the rows of a checkpoint's layer that a rank holds where they are not one range, in the order of y.

Of layers that are several in one tensor: q, k and v one after another or interleaved by head, gate and up. It stands for a
`Part` among a Linear's outputs, and `targets` copy each range to its place.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from quire.workers.loading.target import FLOATS, Target
from quire.workers.parallel import Part


class RowRanges(NamedTuple):
    """`ranges` of a dimension of `full`."""

    full: int
    ranges: tuple[tuple[int, int], ...]  # [start, stop), not empty

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension, in whatever order."""
        return self.size == self.full

    @classmethod
    def of(cls, full: int, parts: Iterable[tuple[int, int]]) -> "RowRanges":
        """Of these ranges, of which neighbours are joined."""
        joined: list[tuple[int, int]] = []
        for start, stop in parts:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        return cls(full, tuple(joined))

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, start in y) of each range."""
        at = 0
        for start, stop in self.ranges:
            yield start, stop, at
            at += stop - start


Rows = Part | RowRanges


def cut(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """These rows of x, which are all of the dimension."""
    return x[rows.slice] if isinstance(rows, Part) else torch.cat([x[start:stop] for start, stop in rows.ranges])


def copied_rows(tensor: torch.Tensor, rows: Rows, columns: Part | None) -> Target:
    """A target that copies these rows and columns (None: there are none) of floats into `tensor`."""
    others = () if columns is None else (columns,)
    shape = tuple(part.full for part in (rows, *others))
    if isinstance(rows, Part):
        return Target(
            shape, (rows.slice, *(part.slice for part in others)), FLOATS, partial(_copy, tensor, ((0, rows.size, 0),))
        )
    whole = (slice(0, rows.full), *(part.slice for part in others))
    return Target(shape, whole, FLOATS, partial(_copy, tensor, tuple(rows.places())))


def _copy(tensor: torch.Tensor, places: tuple[tuple[int, int, int], ...], piece: torch.Tensor, row: int) -> None:
    """What of each range lies in the piece, rows [row, row + n) of the checkpoint's tensor."""
    end = row + len(piece)
    for start, stop, at in places:
        first, last = max(start, row), min(stop, end)
        if first < last:
            found = piece[first - row : last - row]
            if found.dtype != tensor.dtype:
                found = found.to(tensor.device)
            tensor[at + first - start : at + last - start].copy_(found)
