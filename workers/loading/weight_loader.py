"""WeightLoader: where a checkpoint tensor goes. Layers make weight loaders; weights.py reads files and feeds them.

A loader says what the file must contain and takes it slice by slice. Most copy into a view of a parameter (`copied`); a weight
format may also unpack, permute or stack in `write`, which runs on a reader's thread with the reader's stream current.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from quire.workers.shard import RowShard, Shard

FLOATS = ("F32", "F16", "BF16")  # safetensors' names


class WeightsError(ValueError):
    """The checkpoint does not fit the model or cannot be read. The text is for the user."""


class WeightLoader(NamedTuple):
    """Where a checkpoint tensor goes.

    `write(piece, row)` is called with runs of consecutive rows that together are `shard` of the tensor; `row` counts from
    the shard's first (a tensor without dimensions comes whole, as row 0). The piece is in the mapped file: a `write` that does
    more than copy it begins with `piece.to(device)`. Runs of one tensor come in order; several tensors come concurrently.
    """

    shape: tuple[int, ...]  # of the tensor in the file; -1 is any length
    shard: tuple[slice, ...]  # which this rank reads; () is all
    dtypes: tuple[str, ...]  # that `write` takes, by safetensors' names
    write: Callable[[torch.Tensor, int], None]
    or_shapes: tuple[tuple[int, ...], ...] = ()  # other shapes that the tensor may have
    is_optional: bool = False
    is_read: bool = True  # False: the tensor must fit, but it is another rank's
    instead: tuple[str, ...] = ()  # names of tensors any of which may replace it
    # called like `write` when all loaders with the same `then` are written; it must complete a result before it keeps it
    then: Callable[[], None] | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(expected) and all(e in (-1, n) for n, e in zip(shape, expected, strict=True))
            for expected in (self.shape, *self.or_shapes)
        )


def copied(tensor: torch.Tensor, parts: tuple[Shard, ...]) -> WeightLoader:
    """A loader that copies floats into `tensor`, a view of a parameter on the device, and converts their dtype."""
    return WeightLoader(tuple(p.full for p in parts), tuple(p.slice for p in parts), FLOATS, partial(_copy, tensor))


def _copy(tensor: torch.Tensor, piece: torch.Tensor, row: int) -> None:
    if piece.dtype != tensor.dtype:
        piece = piece.to(tensor.device)
    tensor[row : row + len(piece)].copy_(piece)


def copied_rows(tensor: torch.Tensor, rows: RowShard, columns: Shard | None) -> WeightLoader:
    """A loader that copies these rows and columns (None: a bias has none) of floats into `tensor`."""
    others = () if columns is None else (columns,)
    shape = tuple(part.full for part in (rows, *others))
    if isinstance(rows, Shard):
        return WeightLoader(
            shape, (rows.slice, *(part.slice for part in others)), FLOATS, partial(_copy_ranges, tensor, ((0, rows.size, 0),))
        )
    whole = (slice(0, rows.full), *(part.slice for part in others))
    return WeightLoader(shape, whole, FLOATS, partial(_copy_ranges, tensor, tuple(rows.places())))


def _copy_ranges(tensor: torch.Tensor, places: tuple[tuple[int, int, int], ...], piece: torch.Tensor, row: int) -> None:
    """Copy the rows of each range that are in the piece, which is rows [row, row + n) of the checkpoint's tensor."""
    end = row + len(piece)
    for start, stop, at in places:
        first, last = max(start, row), min(stop, end)
        if first < last:
            found = piece[first - row : last - row]
            if found.dtype != tensor.dtype:
                found = found.to(tensor.device)
            tensor[at + first - start : at + last - start].copy_(found)
