"""8-bit weights with 8-bit activations: fp8 (e4m3) with fp8, int8 with int8. Operands are as kernels/linear/scaled has them.

A scale of a whole layer becomes a scale of each of its rows, so layers stack without changing a value. Inputs are quantized as
the checkpoint says, for any number of rows; a dynamic scale is for a token or for 128 of its numbers. The norm in front
quantizes them, or SiLU times up, or, after attention, a launch of its own. Layers with different static scales are a product
each.
"""

from typing import Any, NamedTuple

import torch

from quire.kernels.linear import fp8, int8, quantize, scaled_fused
from quire.kernels.linear.fp8 import wide_rows
from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.triton_support.dependent_launch import mode_for, mode_for_split_k
from quire.workers.layers.formats.format import WeightShard
from quire.workers.layers.formats.quantized import QuantizedFormat
from quire.workers.layers.norm import Norm
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import QuantizedSpec, QuantizedWeight
from quire.workers.loading.quantized.schemes import Activations


def refusal(spec: QuantizedSpec, activations: Activations, inputs: int) -> str | None:
    """The reason why no kernel computes 8-bit values with such activations; None: one does."""
    _, width = spec.block
    if spec.values != activations.dtype:
        return f"{spec.values} weights with {activations.dtype} activations (kernels take both alike)"
    if spec.has_zeros or not activations.is_symmetric:
        return "8-bit values with zero points (kernels take symmetric ones)"
    if activations.group_size not in (0, BLOCK) and activations.group_size < inputs:
        return f"activations in groups of {activations.group_size} (kernels take a token's and {BLOCK})"
    if width < inputs and width % BLOCK:
        return f"weights in blocks of {width} inputs (kernels take multiples of {BLOCK}, and all)"
    return None


MAX_GATED_ROWS = 64  # up to here a product is bound by memory, so that gating in it costs nothing


class Weight(NamedTuple):
    """The fields of a `Scaled`, so that its tensors can be parameters, and the scale of its inputs if that is static."""

    data: torch.Tensor
    scales: torch.Tensor
    rows: int
    input_scale: torch.Tensor | None = None  # float32 [1]

    @property
    def scaled(self) -> Scaled:
        return Scaled(self.data, self.scales, self.rows)


def spread(weight: Weight) -> Weight:
    """The same weight with a scale for each row."""
    if weight.rows == 1:
        return weight
    return weight._replace(scales=weight.scales.repeat_interleave(weight.rows, 0)[: len(weight.data)].contiguous(), rows=1)


class ScaledFormat(QuantizedFormat[Weight]):
    """`kind` is the dtype of weights and of quantized inputs."""

    def __init__(self, shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(shard, has_bias, dtype, device)
        activations = [packing.activations for packing in shard.packings.values() if packing.activations]
        self.by_block = any(0 < how.group_size < shard.columns.size for how in activations)
        self.kind = torch.int8 if activations[0].dtype == "int8" else torch.float8_e4m3fn
        self.splits_in_float = self.kind != torch.int8

    def _linear(
        self, x: Scaled, weight: Weight, bias: torch.Tensor | None, is_gated: bool = False, *, split_k: bool = False
    ) -> torch.Tensor:
        pdl, is_int8 = mode_for(len(x.data)), self.kind == torch.int8
        if split_k:
            product = int8.int8_linear_split_k if is_int8 else fp8.fp8_linear_split_k
            return product(x, weight.scaled, bias, dtype=self.dtype, pdl=pdl)
        linear = int8.int8_linear if is_int8 else fp8.fp8_linear
        return linear(x, weight.scaled, bias, dtype=self.dtype, is_gated=is_gated, pdl=pdl)

    # -------------------------------------------------------------------------------------------------------- loading
    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> Weight:
        (n, k), (height, width) = quantized.q.shape, quantized.block
        if (quantized.zeros is not None and bool(quantized.zeros.any())) or packed.input_zero_point:
            raise ValueError("zero points, of what quantization_config calls symmetric")
        blocks, scales = -(-k // BLOCK), quantized.scales.to(torch.float32)
        scales = scales.expand(-(-n // height), -1)
        if width < k:
            scales = scales.repeat_interleave(width // BLOCK, 1)[:, :blocks]
        elif self.by_block:
            scales = scales.expand(-1, blocks)
        scale = None if packed.input_scale is None else torch.tensor([packed.input_scale], device=quantized.q.device)
        weight = Weight(quantized.q.contiguous(), scales.contiguous(), height, scale)
        return weight if height == BLOCK and weight.scales.shape[1] > 1 else spread(weight)

    def _stacked(self, above: Weight, below: Weight) -> Weight | None:
        first, second = (w.input_scale for w in (above, below))
        if first is not None and second is not None and float(first) != float(second):
            return None
        if above.rows != below.rows or len(above.data) % above.rows:
            above, below = spread(above), spread(below)
        if above.scales.shape[1] != below.scales.shape[1]:
            blocks = max(above.scales.shape[1], below.scales.shape[1])
            above, below = (w._replace(scales=w.scales.expand(-1, blocks)) for w in (above, below))
        data, scales = torch.cat([above.data, below.data]), torch.cat([above.scales, below.scales])
        return above._replace(data=data, scales=scales)

    def _outputs(self, weight: Weight) -> int:
        return len(weight.data)

    # ------------------------------------------------------------------------------------------------------- products
    def _multiplied(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        if not is_gated and self._fuses(len(x), weight):
            y = self._fused(x, weight, bias)
        else:
            y = self._linear(self._quantized(x, weight), weight, bias, is_gated)
        return y if out is None else out.copy_(y)

    def _quantized(self, x: torch.Tensor, weight: Weight) -> Scaled:
        # LATE even where other kernels of the step are PLAIN: `scaled_wide`, which follows, begins with its weights
        pdl = mode_for_split_k(len(x))
        return quantize.quantize(x, self.kind, by_block=self.by_block, static_scale=weight.input_scale, pdl=pdl)

    def _fuses(self, rows: int, weight: Weight) -> bool:
        """Whether one kernel quantizes inputs (or SiLU times up) and multiplies them."""
        return self.dtype.itemsize == 2 and scaled_fused.pays(rows, weight.scaled)

    def _fused(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, *, is_gate_up: bool = False) -> torch.Tensor:
        y, _ = scaled_fused.fused_linear(
            x, weight.scaled, bias, dtype=self.dtype, by_block=self.by_block, static_scale=weight.input_scale,
            is_gate_up=is_gate_up, pdl=mode_for(1),
        )  # fmt: skip
        return y

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.weights) > 1:
            return self.product(x)
        weight, bias = self.weights[0]
        if self._fuses(len(x), weight):
            return self._fused(x, weight, bias)
        return self._linear(self._quantized(x, weight), weight, bias, split_k=True)

    def fuses_silu(self, rows: int) -> bool:
        """Not for few rows: then a product gates its result, and quantizing that takes less time. For one row, if fused."""
        return rows > max(MAX_GATED_ROWS, wide_rows(self.weights[0][0].scaled, is_gated=True)) or (
            len(self.weights) == 1 and self._fuses(rows, self.weights[0][0])
        )

    def behind_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        if len(self.weights) > 1:
            return super().behind_silu(gate_up)
        (weight, bias), pdl = self.weights[0], mode_for_split_k(len(gate_up))
        if self._fuses(len(gate_up), weight):
            return self._fused(gate_up, weight, bias, is_gate_up=True)
        h = quantize.silu_mul_quantize(gate_up, self.kind, by_block=self.by_block, static_scale=weight.input_scale, pdl=pdl)
        return self._linear(h, weight, bias, split_k=True)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.weights) > 1 or not norm.is_plain:
            return super().normed(x, residual, norm, is_gated)
        weight, bias = self.weights[0]
        how: dict[str, Any] = {"by_block": self.by_block, "static_scale": weight.input_scale}
        is_split_k = x is not None and x.dim() == 3
        if not is_gated and self._fuses(len(residual), weight) and not is_split_k:
            how.update(norm=(residual, norm.weight, norm.eps), pdl=mode_for(1))
            y, total = scaled_fused.fused_linear(x, weight.scaled, bias, dtype=self.dtype, **how)
            assert total is not None, "of a norm there is a sum"
            return y, total
        how["pdl"] = mode_for_split_k(len(residual))
        h = quantize.rms_norm_quantize(x, residual, norm.weight, norm.eps, self.kind, **how)
        return self._linear(h, weight, bias, is_gated), residual
