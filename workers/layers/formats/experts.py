"""Experts' weights that stay quantized on a GPU: their owners, and the choice among them.

They are like `QuantizedFormat`, for all experts of a layer, stacked. Parameters have their final size from the start. The
reader that brings an expert's last tensor unpacks and packs just that expert. Dummy values are drawn in the quantized form.
Experts that no kernel computes with are dequantized (layers/experts.py).
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.kernels.experts.four_bits_weight import (
    HALF_EXPONENT,
    MX_GROUP,
    FourBits,
    FourBitWeights,
    narrowed,
    new_int,
    new_mx,
    put_int,
    put_mx,
)
from quire.kernels.experts.scaled_weight import BLOCK, ScaledExperts, ScaledWeights
from quire.kernels.linear import int4_weight
from quire.workers.layers.module import Module
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import QuantizedSpec
from quire.workers.loading.quantized.packing_codes import MxFp4Packing
from quire.workers.loading.quantized.packing_experts import StackedMxFp4Packing
from quire.workers.loading.quantized.schemes import FP8_MAX, INT8_MAX, Activations
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.shard import Shard

CODE_DEVIATION = 2.93  # standard deviation of random e2m1 codes
FIRST_FP8 = (8, 9)  # compute capability
QuantizedSpecs = tuple[QuantizedSpec | None, QuantizedSpec | None]  # gate|up's and down's
DUMMY_INPUTS = 8.0  # the greatest input of random weights that is not cut off
MIDDLE = 8.0  # about the largest number that a 4-bit scale multiplies


class Sizes(NamedTuple):
    """The sizes of a layer of experts; `inner` is this rank's shard of their intermediate dimension."""

    experts: int
    hidden: int
    inner: Shard
    parts: int = 2  # gate and up; 1: there is no gate


class ExpertRows(NamedTuple):
    """The rows of a layer of the checkpoint: some experts', within gate|up or down."""

    is_down: bool
    experts: slice
    rows: slice


class QuantizedExperts(Module):
    """Parameters of gate|up [E, 2 I, H] and down [E, H, I] as kernels take them; the subclass fills them.

    `kept` are named tuples of tensors, which are this module's parameters.
    """

    kept: list[Any]  # gate|up's, down's

    def put(self, packed: PackedWeight, layer: str, place: ExpertRows) -> None:
        """Store a layer when all its tensors are there, on a reader's thread and stream. Raises WeightsError."""
        tensors = packed.taken(layer)
        try:
            self._put(self.kept[place.is_down], packed, tensors, place)
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"{layer}: {error}") from None

    def _put(self, into: Any, packed: PackedWeight, tensors: dict[str, torch.Tensor], place: ExpertRows) -> None:
        raise NotImplementedError

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """Draw random codes, and scales that make values about as wide as uniform ones on ±limit."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called when all values are there."""

    def weights(self, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None) -> Any:
        """The weights as ops.experts takes them."""
        raise NotImplementedError

    def _own(self, kept: list[Any]) -> None:
        self.kept = []
        for name, weight in zip(("gate_up", "down"), kept, strict=True):
            parts = {}
            for field, value in weight._asdict().items():
                self._parameters.pop(f"{name}_{field}", None)
                if isinstance(value, torch.Tensor):
                    parts[field] = nn.Parameter(value, requires_grad=False)
                    self.register_parameter(f"{name}_{field}", parts[field])
            self.kept.append(weight._replace(**parts))


class FourBitExperts(QuantizedExperts):
    kept: list[FourBits]

    def weights(self, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None) -> FourBitWeights:
        return FourBitWeights(self.kept[0], self.kept[1], gate_up_bias, down_bias)

    def _draw_words(self, generator: torch.Generator) -> None:
        for weight in self.kept:
            weight.words.random_(-(2**31), 2**31 - 1, generator=generator)


class MxFp4Experts(FourBitExperts):
    """e2m1 codes with a power of two as the scale of 32 of them."""

    def __init__(self, sizes: Sizes, forms: QuantizedSpecs, dtype: torch.dtype, device: torch.device):
        super().__init__()
        experts, hidden, inner, parts = sizes
        self._own([new_mx(experts, parts * inner.size, hidden, device), new_mx(experts, hidden, inner.size, device)])

    def _put(self, into: FourBits, packed: PackedWeight, tensors: dict[str, torch.Tensor], place: ExpertRows) -> None:
        packing, (rows, columns) = packed.packing, packed.slices
        octets, groups = (slice(columns.start // per, columns.stop // per) for per in (2, MX_GROUP))
        if isinstance(packing, MxFp4Packing):
            codes, exponents = packing.codes(tensors)
            put_mx(into, place.experts, place.rows, codes[None, rows, octets], exponents[None, rows, groups])
            return
        assert isinstance(packing, StackedMxFp4Packing)
        for expert in range(packing.experts):
            parts = zip(*(packing.of_expert(tensor, expert) for tensor in packing.codes(tensors)), strict=True)
            for number, (codes, exponents) in enumerate(parts):
                start, one = number * (rows.stop - rows.start), slice(expert, expert + 1)
                some = slice(start, start + rows.stop - rows.start)
                put_mx(into, one, some, codes[None, rows, octets], exponents[None, rows, groups])

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self._draw_words(generator)
        exponent = 127 + HALF_EXPONENT + round(math.log2(limit / 3**0.5 / CODE_DEVIATION))
        for weight in self.kept:
            assert weight.factors is not None
            weight.scales.fill_(exponent * 0x01010101 - (1 << 32))
            weight.factors.fill_(1.0)


class Int4Experts(FourBitExperts):
    """4-bit integers with a scale per group, and zero points or none."""

    def __init__(self, sizes: Sizes, forms: QuantizedSpecs, dtype: torch.dtype, device: torch.device):
        super().__init__()
        (experts, hidden, inner, parts), self._dtype = sizes, dtype
        kinds = ((parts * inner.size, hidden), (hidden, inner.size))
        groups = [spec.block[1] for spec in forms if spec is not None]
        self._own([
            new_int(experts, n, k, group, torch.float32, device) for (n, k), group in zip(kinds, groups, strict=True)
        ])  # fmt: skip

    def _put(self, into: FourBits, packed: PackedWeight, tensors: dict[str, torch.Tensor], place: ExpertRows) -> None:
        start, (rows, columns) = place.rows.start, packed.slices
        for quantized in packed.packing.chunks(tensors, rows, columns):
            if quantized.order is not None:
                raise ValueError("inputs are in an order of their own, which quantization_config does not say")
            q, full = quantized.q, quantized.with_all_scales()
            some = slice(start, start + len(q))
            zeros = None if full.zeros is None else full.zeros[None]
            put_int(into, place.experts, some, q[None], zeros, full.scales[None])
            start += len(q)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self._draw_words(generator)
        for weight in self.kept:
            assert weight.zeros is not None
            weight.scales.fill_(torch.tensor(limit / MIDDLE).bfloat16().item())
            weight.zeros.fill_(int4_weight.SYMMETRIC_ZERO)

    def finish(self) -> None:
        self._own([narrowed(weight, self._dtype) for weight in self.kept])


class ScaledExpertsFormat(QuantizedExperts):
    """fp8 or int8 weights with a scale per row or per 128 inputs; inputs in the same dtype, scaled per token or per 128.

    The greatest static scale of inputs of a layer's experts is taken for all of them, as in vLLM.
    """

    def __init__(self, sizes: Sizes, forms: QuantizedSpecs, dtype: torch.dtype, device: torch.device, activations: Activations):
        super().__init__()
        experts, hidden, inner, parts = sizes
        small = torch.float8_e4m3fn if activations.dtype == "fp8" else torch.int8
        kinds, made = ((parts * inner.size, hidden, hidden), (hidden, inner.size, inner.full)), []
        by_block = any(0 < activations.group_size < full for _, _, full in kinds)
        for (n, k, full), spec in zip(kinds, forms, strict=True):
            assert spec is not None
            blocks = -(-k // BLOCK) if by_block or spec.block[1] < full else 1
            data = torch.empty(experts, n, k, dtype=small, device=device)
            static = torch.ones(1, device=device) if activations.is_static else None
            made.append(ScaledExperts(data, torch.empty(experts, blocks, n, device=device), by_block, static))
        self._own(made)
        self._input_scales: tuple[list[float], list[float]] = [], []  # of gate|up, of down

    def _put(self, into: ScaledExperts, packed: PackedWeight, tensors: dict[str, torch.Tensor], place: ExpertRows) -> None:
        if packed.input_scale is not None:
            self._input_scales[place.is_down].append(packed.input_scale)
        start, blocks = place.rows.start, into.scales.shape[1]
        for quantized in packed.packing.chunks(tensors, *packed.slices):
            if quantized.zeros is not None and bool(quantized.zeros.any()):
                raise ValueError("zero points, of what quantization_config calls symmetric")
            (q, scales, (_, width), _, _), some = quantized.by_rows(), slice(start, start + len(quantized.q))
            if width < q.shape[1]:
                scales = scales.repeat_interleave(width // BLOCK, 1)[:, :blocks]
            into.data[place.experts, some] = q
            into.scales[place.experts, :, some] = scales.t()
            start += len(q)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for weight in self.kept:
            is_fp8 = weight.data.dtype.is_floating_point
            for expert in weight.data:
                if is_fp8:
                    expert.copy_(
                        torch.empty(expert.shape, device=expert.device).uniform_(-FP8_MAX, FP8_MAX, generator=generator)
                    )
                else:
                    expert.random_(-127, 128, generator=generator)
            weight.scales.fill_(limit / (FP8_MAX if is_fp8 else INT8_MAX))
            if weight.input_scale is not None:
                weight.input_scale.fill_(DUMMY_INPUTS / (FP8_MAX if is_fp8 else INT8_MAX))

    def finish(self) -> None:
        for weight, found in zip(self.kept, self._input_scales, strict=True):
            if weight.input_scale is not None and found:
                weight.input_scale.fill_(max(found))

    def weights(self, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None) -> ScaledWeights:
        return ScaledWeights(self.kept[0], self.kept[1], gate_up_bias, down_bias)


class ChosenFormat(NamedTuple):
    """The class that keeps the experts, and the specs of gate|up and of down."""

    kind: type[MxFp4Experts] | type[Int4Experts] | type[ScaledExpertsFormat]
    forms: QuantizedSpecs
    activations: Activations | None = None

    def make(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> QuantizedExperts:
        if self.activations is None:
            return self.kind(sizes, self.forms, dtype, device)  # type: ignore[call-arg]
        return ScaledExpertsFormat(sizes, self.forms, dtype, device, self.activations)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """A GPU's compute capability; None for a CPU, which keeps nothing quantized."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def choose(
    gate_up: Iterable[PackedWeight], down: Iterable[PackedWeight], sizes: Sizes, capability: tuple[int, int]
) -> ChosenFormat | str:
    """The class that keeps experts of these packed weights on such a GPU; or the reason why they are dequantized."""
    inner, kinds = (
        sizes.inner,
        [{(type(s.packing), s.packing.spec, s.activations) for s in layers} for layers in (gate_up, down)],
    )
    if any(len(kind) > 1 for kind in kinds):
        return "experts of one layer in several formats"
    [(packing, spec, activations)], [(_, down_form, down_activations)] = kinds
    if issubclass(packing, MxFp4Packing | StackedMxFp4Packing):
        if _is_within(inner, MX_GROUP):
            return f"inputs split among GPUs within groups of {MX_GROUP}"
        return ChosenFormat(MxFp4Experts, (None, None))
    if spec is None or down_form is None:
        return "experts of 4-bit codes (kernels take integers and mxfp4)"
    if activations != down_activations or spec.values != down_form.values:
        return "experts of one layer in several formats"
    width = down_form.block[1]
    if spec.has_order or down_form.has_order or (width < inner.full and _is_within(inner, width)):
        return f"inputs split among GPUs within groups of {width}, or in an order of their own"
    if spec.values == "uint4" and activations is None:
        for each, inputs in ((spec, sizes.hidden), (down_form, inner.size)):
            if not int4_weight.supports(each.block[1], inputs):
                return f"4-bit weights in groups of {each.block[1]} (kernels take {int4_weight.GROUPS}, of an even number)"
        return ChosenFormat(Int4Experts, (spec, down_form))
    if spec.values == "fp8" and capability < FIRST_FP8:
        return "fp8 values on this GPU (one of compute capability 8.9 or later has kernels; they take integers on all)"
    if activations is None or activations.dtype != spec.values:
        how = "16-bit" if activations is None else activations.dtype
        return f"experts of {spec.values} values with {how} activations (kernels take 4-bit integers, mxfp4, fp8 and int8)"
    return _scaled(spec, down_form, activations, sizes) or ChosenFormat(ScaledExpertsFormat, (spec, down_form), activations)


def _scaled(spec: QuantizedSpec, down_form: QuantizedSpec, activations: Activations, sizes: Sizes) -> str | None:
    """The reason why no kernel computes 8-bit experts with 8-bit inputs; None: one does."""
    if spec.has_zeros or not activations.is_symmetric:
        return "8-bit values with zero points (kernels take symmetric ones)"
    for each, inputs in ((spec, sizes.hidden), (down_form, sizes.inner.full)):
        if activations.group_size not in (0, BLOCK) and activations.group_size < inputs:
            return f"activations in groups of {activations.group_size} (kernels take a token's and {BLOCK})"
        if each.block[1] < inputs and each.block[1] % BLOCK:
            return f"weights in blocks of {each.block[1]} inputs (kernels take multiples of {BLOCK}, and all)"
    return None


def _is_within(inner: Shard, width: int) -> bool:
    """Whether this rank's shard begins or ends within a group."""
    return not inner.is_whole and bool(inner.start % width or inner.size % width)
