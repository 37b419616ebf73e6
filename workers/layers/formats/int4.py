"""4-bit weights with 16-bit activations, as kernels/linear/int4 computes them: GPTQ, AWQ, auto-round, pack-quantized.

Values are (q - z) s, with groups of 32, 64, multiples of 128, or all inputs; scales keep the checkpoint's dtype.
"""

import torch

from quire.kernels.linear.int4 import int4_linear, int4_linear_split_k
from quire.kernels.linear.int4_norm import int4_norm_linear, pays
from quire.kernels.linear.int4_weight import GROUPS, SYMMETRIC_ZERO, Int4Weight, pack, stacked, supports
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.workers.layers.formats.ordered import OrderedFormat
from quire.workers.layers.norm import Norm
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import QuantizedSpec, QuantizedWeight
from quire.workers.loading.quantized.schemes import Activations


def refusal(spec: QuantizedSpec, activations: Activations | None, inputs: int) -> str | None:
    """The reason why no kernel computes a layer of 4-bit values; None: one does."""
    height, width = spec.block
    if activations is not None:
        return f"4-bit weights with {activations.dtype} activations (kernels take 16-bit ones)"
    if height > 1 or not supports(width, inputs):
        return f"4-bit weights in groups of {width} (kernels take {GROUPS}, of an even number)"
    return None


def narrowed(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 scales in 16 bits if that changes none of them."""
    short = scales.to(dtype)
    return short if scales.dtype == torch.float32 and torch.equal(short.float(), scales) else scales


class Int4(OrderedFormat[Int4Weight]):
    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> Int4Weight:
        q, scales, (_, group), zeros, order = quantized
        n = len(q)
        scales = narrowed(scales, self.dtype).expand(n, -1)
        zeros = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.expand(n, -1)
        given = None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros
        return pack(q, given, scales, group, order)

    def _joined(self, above: Int4Weight, below: Int4Weight) -> Int4Weight:
        return stacked([above, below])

    def _linear(
        self, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool, pdl: int
    ) -> torch.Tensor:
        return int4_linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)

    def _linear_split_k(self, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, pdl: int) -> torch.Tensor:
        return int4_linear_split_k(x, weight, bias, pdl=pdl)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_split_k = x is not None and x.dim() == 3
        if len(self.weights) > 1 or not norm.is_plain or is_split_k or not pays(len(residual), self.weights[0][0]):
            return super().normed(x, residual, norm, is_gated)
        weight, bias = self.weights[0]
        return int4_norm_linear(x, residual, norm.weight, norm.eps, weight, bias, is_gated=is_gated, pdl=mode_for(1))
