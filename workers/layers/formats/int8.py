"""int8 weights with int8 activations (w8a8): as `scaled.ScaledFormat` has them."""

import torch

from quire.kernels.linear import int8
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.workers.layers.formats.scaled import ScaledFormat, Weight


class Int8(ScaledFormat):
    kind = torch.int8

    def _linear(
        self, x: Scaled, weight: Weight, bias: torch.Tensor | None, is_gated: bool = False, *, split_k: bool = False
    ) -> torch.Tensor:
        pdl = mode_for(len(x.data))
        if split_k:
            return int8.int8_linear_split_k(x, weight.scaled, bias, dtype=self.dtype, pdl=pdl)
        return int8.int8_linear(x, weight.scaled, bias, dtype=self.dtype, is_gated=is_gated, pdl=pdl)
