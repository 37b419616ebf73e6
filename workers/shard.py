"""Shard: the part of a dimension that one rank holds, as a range (`Shard`) or as several (`RowRanges`).

Several ranges are needed where a checkpoint's layer is several in one tensor: q, k and v one after another or interleaved by
head, gate and up. `Parallel` (parallel.py) says which shard of a dimension is this rank's.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch


class Shard(NamedTuple):
    """One rank's shard of a dimension of size `full`: [start, stop)."""

    full: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        return self.size == self.full

    def times(self, n: int) -> "Shard":
        """The same shard of a dimension that has n elements for each of this one's: heads -> rows of a projection."""
        return Shard(self.full * n, self.start * n, self.stop * n)


def whole(n: int) -> Shard:
    """A dimension of n that is not split."""
    return Shard(n, 0, n)


def even_split(n: int, rank: int, size: int) -> Shard:
    """A rank's consecutive share of n things; if they do not divide evenly, each of the first ranks has one more."""
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return Shard(n, start, start + each + (rank < more))


class RowRanges(NamedTuple):
    """Several ranges of a dimension of size `full`, in the order of y."""

    full: int
    ranges: tuple[tuple[int, int], ...]  # [start, stop), not empty

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether the ranges cover the whole dimension, in any order."""
        return self.size == self.full

    @classmethod
    def of(cls, full: int, parts: Iterable[tuple[int, int]]) -> "RowRanges":
        """A RowRanges of these ranges; adjacent ones are joined."""
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


RowShard = Shard | RowRanges


def cut(x: torch.Tensor, rows: RowShard) -> torch.Tensor:
    """These rows of x, which has the whole dimension."""
    return x[rows.slice] if isinstance(rows, Shard) else torch.cat([x[start:stop] for start, stop in rows.ranges])
