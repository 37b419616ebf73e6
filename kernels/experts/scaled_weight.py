"""Experts' 8-bit weights with 8-bit inputs, as the kernels of `scaled` read them."""

from typing import NamedTuple

import torch

BLOCK = 128  # size of a scale group, along K


class ScaledExperts(NamedTuple):
    """data [E, N, K], float8_e4m3fn or int8; scales float32 [E, S, N], S = 1 (one a row) or ceil(K / 128).

    by_block: inputs have a scale per group of 128 of K (then S is ceil(K / 128)), else one per token. input_scale: float32 [1],
    in place of both: the scale of all inputs.
    """

    data: torch.Tensor
    scales: torch.Tensor
    by_block: bool
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantized(self) -> torch.Tensor:
        """float32 [E, N, K], in plain torch: the kernels' oracle."""
        scales = self.scales.transpose(1, 2)
        if scales.shape[2] > 1:
            scales = scales.repeat_interleave(BLOCK, 2)[..., : self.data.shape[2]]
        return self.data.float() * scales


class ScaledWeights(NamedTuple):
    """All experts of a layer, or one rank's; as `experts_reference.Weights`."""

    gate_up: ScaledExperts
    down: ScaledExperts
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
