"""Chooses the weight format of a quantized layer on a GPU, from the checkpoint's config alone, before a byte is read.

A layer that no kernel computes with as it is stored is dequantized into a plain weight; `WeightFormat.not_computed` says why.
Adjacent layers of one Linear with equal formats are one format, which stacks them; others are side by side, a product each.
Imports Triton.
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn

from quire.workers.layers.formats import int4, scaled, w8a16
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.formats.format import WeightFormat, WeightShard
from quire.workers.layers.formats.quantized import QuantizedFormat, SideBySide
from quire.workers.loading.quantized.packing import Packing, QuantizedSpec
from quire.workers.loading.quantized.schemes import Activations
from quire.workers.shard import Shard

FIRST_FP8 = (8, 9)  # compute capability: Triton converts e4m3 from Ada on, and Ada's tensor cores are the first to multiply it


class ChosenFormat(NamedTuple):
    """The format of a layer. kind None: plain. Layers of equal kinds and details are stacked."""

    kind: type[QuantizedFormat] | None = None
    details: object = None


def quantized_format(
    shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device, tied_to: nn.Parameter | None = None
) -> WeightFormat:
    """The format of a Linear's layers; the checkpoint holds none, some or all of them quantized."""
    if not shard.packings:
        return Dense(shard, has_bias, dtype, device, tied_to)
    choices, refused, capability = {}, {}, capability_of(device)
    for layer in shard.rows:
        found = choose(shard.packings.get(layer), shard.columns, capability)
        if layer in shard.packings and shard.shape[0] == 1:
            found = "a single output"
        choices[layer] = ChosenFormat() if isinstance(found, str) else found
        if isinstance(found, str):
            refused[layer] = found
    formats: list[WeightFormat] = []
    for (kind, _), layers in itertools.groupby(shard.rows, choices.__getitem__):
        part = shard.of(list(layers))
        if kind is not None:
            formats.append(kind(part, has_bias, dtype, device))
        else:
            plain = Dense(part, has_bias, dtype, device)
            plain.not_computed = {layer: refused[layer] for layer in part.packings}
            formats.append(plain)
    return formats[0] if len(formats) == 1 else SideBySide(formats)


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose(packing: Packing | None, columns: Shard, capability: tuple[int, int]) -> ChosenFormat | str:
    """The format of a layer with this packing and this rank's `columns`, on such a GPU; or the reason why there is none."""
    if packing is None:
        return ChosenFormat()
    spec, activations = packing.spec, packing.activations
    if spec is None:
        return "4-bit codes (kernels take integers)"
    width = spec.block[1]
    if not columns.is_whole and (spec.has_order or (width < columns.full and columns.start % width)):
        return f"inputs split among GPUs within groups of {width}, or across an order of theirs"
    if spec.values == "fp8" and capability < FIRST_FP8:
        return "fp8 values on this GPU (one of compute capability 8.9 or later has kernels; they take integers on all)"
    return _by_values(spec, activations, columns.size)


def _by_values(spec: QuantizedSpec, activations: Activations | None, inputs: int) -> ChosenFormat | str:
    if spec.values == "uint4":
        return int4.refusal(spec, activations, inputs) or ChosenFormat(int4.Int4, spec.block)
    if activations is None:
        return w8a16.refusal(spec, inputs) or ChosenFormat(w8a16.W8A16, (spec.values, spec.block[1]))
    return scaled.refusal(spec, activations, inputs) or ChosenFormat(scaled.ScaledFormat, activations)
