"""Exchanges of a rank whose others are not there (--emulate-world-size): its share of the work, and sums that cost nothing.

To measure what a rank of a larger group takes on the one GPU at hand. What it computes means nothing.
"""

import torch

from quire.workers.layers import ops


class EmulatedExchange:
    """An Exchange and a NormExchange of `size` ranks that all say what this one says; sums are its own part."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self._size, *x.shape).contiguous()

    def close(self) -> None:
        pass

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.add_rms_norm(x, residual, weight, eps)
