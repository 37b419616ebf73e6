"""Exchanges of one rank without the others (--emulate-world-size): it does its share of the work, and sums cost nothing.

This measures the time of a rank of a larger group on a single GPU. The results are meaningless.
"""

import torch

from quire.workers.layers import ops


class EmulatedExchange:
    """An Exchange and a NormExchange of `size` ranks: gathers repeat this rank's tensor, sums are this rank's partial sum."""

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
