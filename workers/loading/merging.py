"""Adding a product of two factors to a weight while it loads: slice by slice, in float32, so no second copy is made."""

from functools import partial

import torch

from quire.workers.loading.weight_loader import WeightLoader


def adding(loader: WeightLoader, left: torch.Tensor, right: torch.Tensor) -> WeightLoader:
    """The loader of a weight W [rows, columns] that writes W + left right, float32 [rows, r] and [r, columns]."""
    rows, columns = (*loader.shard, slice(None), slice(None))[:2]
    return loader._replace(write=partial(_write, loader, left[rows], right[:, columns]))


def _write(loader: WeightLoader, left: torch.Tensor, right: torch.Tensor, piece: torch.Tensor, row: int) -> None:
    loader.write(piece.float().addmm(left[row : row + len(piece)], right), row)
