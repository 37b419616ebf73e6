"""Target: where a checkpoint tensor goes. Layers make targets, weights.py reads files and feeds them.

A target says what the file must hold and takes it piece by piece. Most copy into a view of a parameter (`copied`); a weight
format may as well unpack, permute or stack: its `write` runs on a reader's thread, with the reader's stream current.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from quire.workers.shard import RowShard, Shard

FLOATS = ("F32", "F16", "BF16")  # safetensors' names


class WeightsError(ValueError):
    """The checkpoint does not fit the model or cannot be read; the text is meant for the user."""


class WeightLoader(NamedTuple):
    """Where a checkpoint tensor goes.

    `write(piece, row)` is called with runs of consecutive rows that together are `part` of the tensor; `row` counts from
    the part's first (a tensor without dimensions comes whole, as row 0). The piece lies in the mapped file: what does more
    than copy it begins with `piece.to(device)`. Runs of one tensor come in order; of several tensors, at the same time.
    """

    shape: tuple[int, ...]  # of the tensor in the file; -1 is any length
    shard: tuple[slice, ...]  # this rank's, which it reads; () is all
    dtypes: tuple[str, ...]  # that `write` takes, by safetensors' names
    write: Callable[[torch.Tensor, int], None]
    or_shapes: tuple[tuple[int, ...], ...] = ()  # that the tensor may have as well
    is_optional: bool = False
    is_read: bool = True  # False: it must fit, and is another rank's
    instead: tuple[str, ...] = ()  # tensors any of which may take its place
    # called when all targets with the same one are written, as `write` is: what it makes must be whole before it is kept
    then: Callable[[], None] | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(expected) and all(e in (-1, n) for n, e in zip(shape, expected, strict=True))
            for expected in (self.shape, *self.or_shapes)
        )


def copied(tensor: torch.Tensor, parts: tuple[Shard, ...]) -> WeightLoader:
    """A target that copies floats into `tensor`, a view of a parameter on the device, which converts the dtype."""
    return WeightLoader(tuple(p.full for p in parts), tuple(p.slice for p in parts), FLOATS, partial(_copy, tensor))


def _copy(tensor: torch.Tensor, piece: torch.Tensor, row: int) -> None:
    if piece.dtype != tensor.dtype:
        piece = piece.to(tensor.device)
    tensor[row : row + len(piece)].copy_(piece)


def copied_rows(tensor: torch.Tensor, rows: RowShard, columns: Shard | None) -> WeightLoader:
    """A target that copies these rows and columns (None: there are none) of floats into `tensor`."""
    others = () if columns is None else (columns,)
    shape = tuple(part.full for part in (rows, *others))
    if isinstance(rows, Shard):
        return WeightLoader(
            shape, (rows.slice, *(part.slice for part in others)), FLOATS, partial(_copy_ranges, tensor, ((0, rows.size, 0),))
        )
    whole = (slice(0, rows.full), *(part.slice for part in others))
    return WeightLoader(shape, whole, FLOATS, partial(_copy_ranges, tensor, tuple(rows.places())))


def _copy_ranges(tensor: torch.Tensor, places: tuple[tuple[int, int, int], ...], piece: torch.Tensor, row: int) -> None:
    """What of each range lies in the piece, rows [row, row + n) of the checkpoint's tensor."""
    end = row + len(piece)
    for start, stop, at in places:
        first, last = max(start, row), min(stop, end)
        if first < last:
            found = piece[first - row : last - row]
            if found.dtype != tensor.dtype:
                found = found.to(tensor.device)
            tensor[at + first - start : at + last - start].copy_(found)
