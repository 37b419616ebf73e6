"""Weights that stay in few bits on a CPU: 4-bit and 8-bit integers, fp8, and the codes of nf4, fp4 and mxfp4.

The products are in kernels/linear/int4_cpu.py and blocks_cpu.py. Activations between layers keep the model's type. A layer is
made when its last tensor comes: no more than the layers that a few readers work on is unpacked, and none is ever dequantized
as a whole. chosen_cpu.py chooses a layer's format; ipc/kept_bytes.py says how many bytes it takes.
"""

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.nn import functional as F

from quire.ipc.kept_bytes import kept_bytes
from quire.kernels.linear import blocks_cpu, int4_cpu
from quire.kernels.linear.blocks_cpu import Codes4, Grouped8, Int8Rows
from quire.kernels.linear.int4_cpu import PackedInt4
from quire.kernels.linear.linear_cpu import can_pack
from quire.workers.layers import ops
from quire.workers.layers.formats.activations import RoundedInputs
from quire.workers.layers.formats.format import Format, WeightShard
from quire.workers.layers.formats.packed_cpu import padded_rows
from quire.workers.layers.formats.quantized import QuantizedFormat
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import Packing, QuantizedWeight, Tensors, joined
from quire.workers.loading.quantized.packing_codes import FourBitPacking, MxFp4Packing, StoredCodes
from quire.workers.loading.quantized.schemes import MX_GROUP
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.shard import RowShard, Shard, cut

CODES_GROUP = 64  # inputs of a scale of dummy weights

W = TypeVar("W", PackedInt4, Int8Rows, Grouped8, Codes4)


def multiplied(x: torch.Tensor, weight: PackedInt4 | Int8Rows | Grouped8 | Codes4) -> torch.Tensor:
    """x [T, K] -> x Wᵀ [T, N] in x's dtype, float32 or bfloat16, by any of these weights. Rows are padded by `padded_rows`."""
    if isinstance(weight, PackedInt4):
        return int4_cpu.int4_linear(x, weight)
    is_quick, rows = can_pack(x[:0]), len(x)
    if is_quick and (padded := padded_rows(rows)) > rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    product = blocks_cpu.int8_linear if isinstance(weight, Int8Rows) else blocks_cpu.held_linear
    return product(x, weight, is_quick)[:rows]  # type: ignore[arg-type]


def expected_bytes(packing: Packing, outputs: int, inputs: int) -> int:
    """The bytes of a layer, or of this rank's part of it, before it is there."""
    if isinstance(packing, FourBitPacking):
        return kept_bytes(packing.scheme.quant_type, outputs, inputs, (1, CODES_GROUP))
    if isinstance(packing, MxFp4Packing):
        return kept_bytes("mxfp4", outputs, inputs, (1, MX_GROUP))
    assert packing.spec is not None
    return kept_bytes(packing.spec.values, outputs, inputs, packing.spec.block)


class KeptCpu(QuantizedFormat[W]):
    """The products of all formats here; subclasses make the weights."""

    def __init__(self, shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(shard, has_bias, dtype, device)
        inputs = shard.columns.size
        self.opaque_bytes = sum(
            expected_bytes(one.packing, shard.rows[n].size, inputs) for n, one in self.packed_layers.items()
        )

    def finish(self) -> None:
        super().finish()
        self.opaque_bytes = 0  # parameters, from here on

    def wrapped(self) -> Format:
        if not any(layer.activations for layer in self.packed_layers.values()):
            return self
        return RoundedInputs(self, [(rows.size, self.packed_layers.get(layer)) for layer, rows in self.shard.rows.items()])

    def _multiplied(
        self, x: torch.Tensor, weight: W, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        y = multiplied(x, weight)
        if bias is not None:
            y = y.add_(bias)
        if is_gated:
            y = ops.silu_mul(y)
        return y if out is None else out.copy_(y)

    def _make(self, layer: str, chunks: Iterator[QuantizedWeight]) -> None:
        self._made[layer] = self._weight_of(joined(list(chunks)), self.packed_layers[layer])

    def _stacked(self, above: W, below: W) -> W | None:
        return None

    def _outputs(self, weight: W) -> int:
        return weight.outputs


def of_nibbles(quantized: QuantizedWeight, bits: int) -> PackedInt4:
    """The weight of unsigned integers of 4 or 8 bits."""
    q, scales, (_, width), zeros, order = quantized.by_rows()
    return (int4_cpu.pack if bits == 4 else int4_cpu.pack8)(q, zeros, scales.float(), width, order)


def of_rows(quantized: QuantizedWeight) -> Int8Rows:
    """The weight of int8 with a scale for each output or for all. Raises ValueError for zero points."""
    if quantized.zeros is not None and bool(quantized.zeros.any()):
        raise ValueError("zero points, of what quantization_config calls symmetric")
    by_rows = quantized.by_rows()
    return Int8Rows(by_rows.q.clone(memory_format=torch.contiguous_format), by_rows.scales[:, 0].float().contiguous())


def of_groups(quantized: QuantizedWeight) -> Grouped8:
    """The weight of values of 8 bits, as they are stored. They are copied, for a checkpoint's file is closed."""
    q, scales, (height, width), zeros, order = quantized
    return Grouped8(
        q.clone(memory_format=torch.contiguous_format),
        scales.float().contiguous(),
        height,
        width,
        None if zeros is None or not bool(zeros.any()) else zeros.float().contiguous(),
        None if order is None else order.argsort(),
    )


def of_codes(stored: StoredCodes, rows: RowShard, columns: Shard) -> Codes4:
    """This rank's part of a layer's codes. Where groups end within rows, scales are for the common part of groups and rows."""
    n, k = rows.full, columns.full
    width = math.gcd(stored.group_size, k, columns.start, columns.size)
    scales = stored.scales.repeat_interleave(stored.group_size // width)[: n * k // width].view(n, -1)
    octets = cut(stored.octets.flatten()[: n * k // 2].view(n, -1), rows)[:, columns.start // 2 : columns.stop // 2]
    return Codes4(
        octets.clone(memory_format=torch.contiguous_format),
        blocks_cpu.pairs_of(stored.table, high_first=stored.is_high_first),
        cut(scales, rows)[:, columns.start // width : columns.stop // width].clone(memory_format=torch.contiguous_format),
    )


def drawn_codes(outputs: int, inputs: int, group: int, limit: float, generator: torch.Generator) -> Codes4:
    """A random weight, with values on ±limit."""
    width = math.gcd(group, inputs)
    octets = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    pairs = blocks_cpu.pairs_of(torch.linspace(-1, 1, 16), high_first=True)
    return Codes4(octets, pairs, torch.full((outputs, inputs // width), limit))


def in_blocks(chunks: Iterator[QuantizedWeight]) -> Iterator[QuantizedWeight]:
    """Chunks of outputs, joined where a block of int4_cpu.py would end within one."""
    waiting: list[QuantizedWeight] = []
    for chunk in chunks:
        waiting.append(chunk)
        if sum(len(one.q) for one in waiting) % int4_cpu.BLOCK == 0:
            yield joined(waiting)
            waiting = []
    if waiting:
        yield joined(waiting)


class Int4Cpu(KeptCpu[PackedInt4]):
    """Unsigned integers of 4 bits with scales and zero points for groups of inputs, in order or not."""

    def _make(self, layer: str, chunks: Iterator[QuantizedWeight]) -> None:
        packed = self.packed_layers[layer]  # chunks are packed while they are in the CPU's caches
        weight = int4_cpu.stacked([self._weight_of(chunk, packed) for chunk in in_blocks(chunks)])
        assert weight is not None, "outputs of one layer have the same inputs"
        self._made[layer] = weight

    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> PackedInt4:
        return of_nibbles(quantized, 4)

    def _stacked(self, above: PackedInt4, below: PackedInt4) -> PackedInt4 | None:
        return int4_cpu.stacked([above, below])


class PlanesCpu(Int4Cpu):
    """The same of 8 bits, as two planes of 4."""

    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> PackedInt4:
        return of_nibbles(quantized, 8)


class Int8Cpu(KeptCpu[Int8Rows]):
    """int8 with a scale for each output or for all; inputs are as they are."""

    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> Int8Rows:
        return of_rows(quantized)

    def _stacked(self, above: Int8Rows, below: Int8Rows) -> Int8Rows:
        return Int8Rows(torch.cat((above.q, below.q)), torch.cat((above.scales, below.scales)))


class Grouped8Cpu(KeptCpu[Grouped8]):
    """int8 and fp8 with scales for groups of outputs and inputs, for inputs that are rounded, too."""

    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> Grouped8:
        return of_groups(quantized)


class CodesCpu(KeptCpu[Codes4]):
    """Codes of 4 bits, which a table has the values of, with a scale for each group."""

    def _load(self, layer: str, name: str) -> None:
        packed = self.packed_layers[layer]
        tensors = packed.taken(name)
        try:
            self._made[layer] = of_codes(codes_of(packed).stored(tensors), self.shard.rows[layer], self.shard.columns)
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"{name} cannot be unpacked: {error}") from None

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        if self.bias is not None:
            self.bias.uniform_(-limit, limit, generator=generator)
        for layer, rows in self.shard.rows.items():
            self._made[layer] = drawn_codes(rows.size, self.shard.columns.size, CODES_GROUP, limit, generator)


def codes_of(packed: PackedWeight) -> FourBitPacking | MxFp4Packing:
    assert isinstance(packed.packing, FourBitPacking | MxFp4Packing)
    return packed.packing


def kept_weight(
    kind: type[QuantizedFormat],
    packed: PackedWeight,
    tensors: Tensors,
    rows: Shard,
    columns: Shard,  # type: ignore[type-arg]
) -> PackedInt4 | Int8Rows | Grouped8 | Codes4:
    """The weight that a format of this kind would make of a layer's tensors. Raises ValueError, like packings."""
    if kind is CodesCpu:
        return of_codes(codes_of(packed).stored(tensors), rows, columns)
    return made_of(kind, joined(list(packed.packing.chunks(tensors, rows.slice, columns.slice))))


def made_of(kind: type[QuantizedFormat], quantized: QuantizedWeight) -> PackedInt4 | Int8Rows | Grouped8:  # type: ignore[type-arg]
    """The same of an unpacked weight."""
    if issubclass(kind, Int4Cpu):
        return of_nibbles(quantized, 8 if kind is PlanesCpu else 4)
    return of_rows(quantized) if kind is Int8Cpu else of_groups(quantized)
