"""Which format holds a quantized layer on a GPU: known from the checkpoint's config alone, before a byte is read.

A layer that no kernel computes as it is stored is dequantized into a plain weight, and says why (`Format.not_computed`). Layers
of one Linear that are held alike are one format, which stacks them; others lie side by side, a product each. Imports Triton.
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn

from quire.workers.layers.formats import int4, scaled, w8a16
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.formats.format import Format, Partition
from quire.workers.layers.formats.quantized import Quantized, SideBySide
from quire.workers.loading.quantized.layouts import Form
from quire.workers.loading.quantized.schemes import Activations
from quire.workers.loading.quantized.stored import Source
from quire.workers.parallel import Part

FIRST_FP8 = (8, 9)  # compute capability: Triton converts e4m3 from Ada on, whose tensor cores are the first to multiply it


class Choice(NamedTuple):
    """The format of a layer. kind None: plain; layers whose kinds and details are equal are stacked."""

    kind: type[Quantized] | None = None
    details: object = None


def quantized_format(
    partition: Partition, has_bias: bool, dtype: torch.dtype, device: torch.device, tied_to: nn.Parameter | None = None
) -> Format:
    """The format of a Linear's layers, none, some or all of which the checkpoint holds quantized."""
    if not partition.sources:
        return Dense(partition, has_bias, dtype, device, tied_to)
    choices, refused, capability = {}, {}, capability_of(device)
    for layer in partition.rows:
        found = choose(partition.sources.get(layer), partition.columns, capability)
        if layer in partition.sources and partition.shape[0] == 1:
            found = "a single output"
        choices[layer] = Choice() if isinstance(found, str) else found
        if isinstance(found, str):
            refused[layer] = found
    formats: list[Format] = []
    for (kind, _), layers in itertools.groupby(partition.rows, choices.__getitem__):
        part = _of(partition, list(layers))
        if kind is not None:
            formats.append(kind(part, has_bias, dtype, device))
        else:
            plain = Dense(part, has_bias, dtype, device)
            plain.not_computed = {layer: refused[layer] for layer in part.sources}
            formats.append(plain)
    return formats[0] if len(formats) == 1 else SideBySide(formats)


def _of(partition: Partition, layers: list[str]) -> Partition:
    rows = {layer: partition.rows[layer] for layer in layers}
    sources = {layer: partition.sources[layer] for layer in layers if layer in partition.sources}
    return partition._replace(rows=rows, sources=sources)


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose(source: Source | None, columns: Part, capability: tuple[int, int]) -> Choice | str:
    """The format of a layer stored so, of which this rank has these inputs, on such a GPU; or why there is none."""
    if source is None:
        return Choice()
    form, activations = source.layout.form, source.activations
    if form is None:
        return "4-bit codes (kernels take integers)"
    width = form.block[1]
    if not columns.is_whole and (form.has_order or (width < columns.full and columns.start % width)):
        return f"inputs split among GPUs within groups of {width}, or across an order of theirs"
    if form.values == "fp8" and capability < FIRST_FP8:
        return "fp8 values on this GPU (one of compute capability 8.9 or later has kernels; they take integers on all)"
    return _by_values(form, activations, columns.size)


def _by_values(form: Form, activations: Activations | None, inputs: int) -> Choice | str:
    if form.values == "uint4":
        return int4.refusal(form, activations, inputs) or Choice(int4.Int4, form.block)
    if activations is None:
        return w8a16.refusal(form, inputs) or Choice(w8a16.W8A16, (form.values, form.block[1]))
    return scaled.refusal(form, activations, inputs) or Choice(scaled.ScaledFormat, activations)
