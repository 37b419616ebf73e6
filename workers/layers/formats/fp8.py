"""fp8 weights (e4m3) with fp8 activations: scales of the tensor, of rows, or of blocks of 128; dynamic or static inputs."""

import torch

from quire.kernels.linear import fp8
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.workers.layers.formats.scaled import ScaledFormat, Weight


class Fp8(ScaledFormat):
    kind = torch.float8_e4m3fn

    def _linear(
        self, x: Scaled, weight: Weight, bias: torch.Tensor | None, is_gated: bool = False, *, split_k: bool = False
    ) -> torch.Tensor:
        pdl = mode_for(len(x.data))
        if split_k:
            return fp8.fp8_linear_split_k(x, weight.scaled, bias, dtype=self.dtype, pdl=pdl)
        return fp8.fp8_linear(x, weight.scaled, bias, dtype=self.dtype, is_gated=is_gated, pdl=pdl)
