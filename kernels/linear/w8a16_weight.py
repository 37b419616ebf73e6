"""An 8-bit weight for 16-bit activations, as the kernels of `w8a16` read it.

    W[n, k] = (q[n, k] - z[n, k // g]) * s[n, k // g]        group g of K: 32, 64, a multiple of 128, or all of it

Bytes are stored as in checkpoints, one row of W after the other.
"""

from typing import NamedTuple

import torch

from quire.kernels.linear.scaled import BLOCK

GROUPS = "32, 64, a multiple of 128, or all inputs"


class Weight8(NamedTuple):
    """data [N, K], int8 or float8_e4m3fn; scales [N, G], of any float dtype; zeros int16 [N, G], None if all are 0."""

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int  # along K; K itself if there is one group
    perm: torch.Tensor | None = None  # int32 [K]: column i of W is for x[:, perm[i]]
    places: torch.Tensor | None = None  # perm's inverse

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in the order of its own columns, in plain torch."""
        of = torch.arange(self.data.shape[1], device=self.data.device) // self.group
        w = self.data.float() if self.zeros is None else self.data.float() - self.zeros.float()[:, of]
        return (w * self.scales.float()[:, of]).to(dtype)


def supports(group: int, inputs: int) -> bool:
    """Whether the kernels support groups of this size."""
    return group in (32, 64) or group % BLOCK == 0 or group >= inputs


def stacked(weights: list[Weight8]) -> Weight8:
    """The outputs of several weights concatenated, all of one group, dtype and order: scales take the widest dtype."""
    first, *_ = weights
    zeros = None
    if any(w.zeros is not None for w in weights):
        zeros = torch.cat([torch.zeros_like(w.scales, dtype=torch.int16) if w.zeros is None else w.zeros for w in weights])
    data, scales = torch.cat([w.data for w in weights]), torch.cat([w.scales for w in weights])
    return first._replace(data=data, scales=scales, zeros=zeros)
