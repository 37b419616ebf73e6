"""8-bit weights with 16-bit activations, as kernels/linear/w8a16 computes them: 8-bit GPTQ, pack-quantized, bitsandbytes'
int8, and int8 or fp8 checkpoints that do not quantize activations.

Unsigned values and their zero points become signed: 128 is subtracted from both.
"""

import torch

from quire.kernels.linear.w8a16 import w8a16_linear, w8a16_linear_split_k
from quire.kernels.linear.w8a16_weight import GROUPS, Weight8, stacked, supports
from quire.workers.layers.formats.ordered import OrderedFormat
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import QuantizedSpec, QuantizedWeight

MIDDLE = 128


def refusal(spec: QuantizedSpec, inputs: int) -> str | None:
    """The reason why no kernel computes a layer of 8-bit values; None: one does."""
    width = spec.block[1]
    if not supports(width, inputs):
        return f"8-bit weights in groups of {width} (kernels take {GROUPS})"
    return None


def _to_rows(grid: torch.Tensor, height: int, n: int) -> torch.Tensor:
    """[N, G] from a grid that has a row for each `height` outputs."""
    grid = grid.expand(-(-n // height), -1)
    return grid if height == 1 else grid.repeat_interleave(height, 0)[:n]


class W8A16(OrderedFormat[Weight8]):
    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> Weight8:
        q, scales, (height, width), zeros, order = quantized
        n, k = q.shape
        scales = _to_rows(scales, height, n)
        zeros = None if zeros is None else _to_rows(zeros, height, n)
        if q.dtype == torch.uint8:
            q = (q ^ MIDDLE).view(torch.int8)
            zeros = torch.full_like(scales, -MIDDLE, dtype=torch.int32) if zeros is None else zeros - MIDDLE
        if zeros is not None:
            zeros = zeros.to(torch.int16).contiguous() if bool(zeros.any()) else None
        weight = Weight8(q.contiguous(), scales.contiguous(), zeros, min(width, k))
        if order is None:
            return weight
        return weight._replace(perm=order.to(torch.int32), places=order.argsort().to(torch.int32))

    def _joined(self, above: Weight8, below: Weight8) -> Weight8:
        return stacked([above, below])

    def _linear(
        self, x: torch.Tensor, weight: Weight8, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool, pdl: int
    ) -> torch.Tensor:
        return w8a16_linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)

    def _linear_split_k(self, x: torch.Tensor, weight: Weight8, bias: torch.Tensor | None, pdl: int) -> torch.Tensor:
        return w8a16_linear_split_k(x, weight, bias, pdl=pdl)
