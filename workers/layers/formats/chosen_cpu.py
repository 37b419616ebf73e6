"""Chooses the weight format of a quantized layer on a CPU, from the checkpoint's config alone, before a byte is read.

A layer that no format here holds is dequantized, like a plain one; `WeightFormat.not_computed` says why. Adjacent layers of one
Linear with equal formats are one format. choose is also what `ipc/kept_bytes.py`'s table follows.
"""

import itertools

import torch
from torch import nn

from quire.kernels.linear import int4_cpu
from quire.kernels.linear.blocks_cpu import can_multiply_int8
from quire.kernels.linear.linear_cpu import can_pack
from quire.workers.layers.formats.dense import Dense, Unquantized
from quire.workers.layers.formats.format import WeightFormat, WeightShard
from quire.workers.layers.formats.kept_cpu import CodesCpu, Grouped8Cpu, Int4Cpu, Int8Cpu, PlanesCpu
from quire.workers.layers.formats.packed_cpu import PackedCpu
from quire.workers.layers.formats.quantized import QuantizedFormat, SideBySide
from quire.workers.loading.quantized.packing import Packing
from quire.workers.loading.quantized.packing_codes import FourBitPacking, MxFp4Packing
from quire.workers.loading.quantized.schemes import MX_GROUP
from quire.workers.shard import Shard

DTYPES = (torch.float32, torch.bfloat16)  # of activations


def kept_format(
    shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device, tied_to: nn.Parameter | None = None
) -> WeightFormat:
    """The format of a Linear's layers; the checkpoint holds none, some or all of them quantized."""
    plain: type[Unquantized] = PackedCpu if can_pack(torch.empty(0, dtype=dtype)) else Dense
    if not shard.packings:
        return plain(shard, has_bias, dtype, device, tied_to)
    choices = {layer: choose(shard.packings[layer], shard.columns, dtype) for layer in shard.packings}
    kinds = {layer: kind for layer, kind in choices.items() if not isinstance(kind, str)}
    formats: list[WeightFormat] = []
    for kind, layers in itertools.groupby(shard.rows, kinds.get):
        part = shard.of(list(layers))
        if kind is not None:
            formats.append(kind(part, has_bias, dtype, device))
        else:
            formats.append(plain(part, has_bias, dtype, device))
            formats[-1].not_computed = {layer: str(choices[layer]) for layer in part.packings}
    return formats[0] if len(formats) == 1 else SideBySide(formats)


def choose(packing: Packing, columns: Shard, dtype: torch.dtype) -> type[QuantizedFormat] | str:  # type: ignore[type-arg]
    """The format of a layer with this packing and this rank's `columns`; or the reason why there is none."""
    if dtype not in DTYPES:
        return (
            f"weights of few bits for activations of {str(dtype).removeprefix('torch.')} on a CPU (float32 and bfloat16 work)"
        )
    if isinstance(packing, FourBitPacking):
        is_even = columns.full % 2 == columns.start % 2 == columns.size % 2 == 0
        return CodesCpu if is_even else "4-bit codes of an odd number of inputs"
    spec, activations = packing.spec, packing.activations
    assert spec is not None, "only stacked experts have none"
    width = spec.block[1]
    if not columns.is_whole and (spec.has_order or (width < columns.full and columns.start % width)):
        return f"inputs split among ranks within groups of {width}, or across an order of theirs"
    if isinstance(packing, MxFp4Packing):
        return CodesCpu if columns.size % MX_GROUP == 0 else f"inputs split among ranks within groups of {MX_GROUP}"
    if spec.values in ("uint4", "uint8"):
        kind = Int4Cpu if spec.values == "uint4" else PlanesCpu
        return kind if int4_cpu.can_pack() else "4-bit integers on this CPU (PyTorch needs AVX2 or AVX-512 for them)"
    is_by_rows = spec.values == "int8" and width >= columns.full and not spec.has_zeros
    return Int8Cpu if is_by_rows and activations is None and can_multiply_int8(columns.size) else Grouped8Cpu
