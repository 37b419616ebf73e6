"""Gives a skeleton its layers: linear layers and experts of ours where the recording allows it, and memory for the rest.

Embeddings, and norms that compute the same as ours, are replaced by ours; sibling linear layers that take the same tensor
become one product. Modules that are not recognized stay transformers' own.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.workers.layers.linear import Linear, Placement
from quire.workers.loading.quantized.schemes import PackQuantized, QuantizationError, QuantizationScheme, Scaled
from quire.workers.models.transformers.experts import StackedExperts, recognised, transformers_own
from quire.workers.models.transformers.interface import EXPERTS
from quire.workers.models.transformers.layers import (
    FlatEmbedding,
    FlatLayerNorm,
    FlatLinear,
    FlatRMSNorm,
    FusedMLP,
    JoinedLinear,
    Rest,
)
from quire.workers.models.transformers.recognise import gated_mlp_of, layer_norm_of, rms_norm_of
from quire.workers.models.transformers.recorder import Recording
from quire.workers.models.transformers.skeleton import Model
from quire.workers.shard import Shard, whole


class Replacement(NamedTuple):
    """The information that loading needs."""

    tied: dict[str, str]  # a tensor -> the tensor that it shares values with
    transposed: set[str]  # tensors that a checkpoint holds transposed


class Shape(NamedTuple):
    """The shape of a linear layer."""

    inputs: int
    outputs: int
    has_bias: bool


def replace_layers(model: Model, recording: Recording, place: Placement) -> Replacement:
    """Change `model`, with parameters on the meta device, in place. Raises QuantizationError."""
    place = _with_plain_head(model, place)
    tied = {name: other for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items() if name != other}
    transposed: set[str] = set()
    fixed = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
    inputs = {call.module: call.input for call in recording.linears if call.module not in fixed}
    for name, module in list(model.named_modules()):
        if name not in fixed and (norm := rms_norm_of(module, place.dtype)) is not None:
            _set(model, name, FlatRMSNorm(norm.size, norm.eps, place.dtype, place.device, weighs=norm.weighs))
    _replace_layer_norms_and_embeddings(model, fixed, set(tied), place)
    for name, module in list(model.named_modules()):
        _replace_mlp(model, name, module, inputs, place)
    groups: dict[tuple[str, int], list[str]] = {}
    for name, number in inputs.items():
        groups.setdefault((name.rpartition(".")[0], number), []).append(name)
    for (parent, _), names in groups.items():
        _replace_linears(model, parent, names, place)
    for name, module in list(model.named_modules()):
        if type(module) is Conv1D and name not in fixed:
            transposed.add(f"{name}.weight")
            _set(model, name, _linear([name], [Shape(module.nx, module.nf, True)], place, FlatLinear))
    for name in recording.experts:
        _check_experts(name, place)
        _replace_experts(model.get_submodule(name), place)
    _make_rest(model, tied, place)
    _replace_tied_head(model, recording, tied, place)
    return Replacement(tied, transposed)


def _replace_layer_norms_and_embeddings(model: Model, fixed: set[str], tied: set[str], place: Placement) -> None:
    """Replace LayerNorms and embeddings. An embedding that owns a shared weight stays its owner."""
    exact = _kept_in_float32(model, place.dtype)
    for name, module in list(model.named_modules()):
        if exact.search(f"{name}.weight"):
            continue
        if name not in fixed and (norm := layer_norm_of(module, place.dtype)) is not None:
            made = FlatLayerNorm(norm.size, norm.eps, place.dtype, place.device, has_bias=norm.has_bias)
            _set(model, name, made)
        elif type(module) is nn.Embedding and f"{name}.weight" not in tied and module.max_norm is None:
            _set(model, name, FlatEmbedding(module, place.dtype, place.device))


def _shape(module: nn.Module) -> Shape:
    assert isinstance(module, nn.Linear)
    return Shape(module.in_features, module.out_features, module.bias is not None)


def _replace_mlp(model: Model, name: str, module: nn.Module, inputs: dict[str, int], place: Placement) -> None:
    """Replace the module by a FusedMLP if it is an MLP, and remove its layers from `inputs`."""
    found = gated_mlp_of(module)
    if found is None:
        return
    gate_up, down = [f"{name}.{own}" for own in found.gate_up], f"{name}.{found.down}"
    if down not in inputs or len({inputs.get(own, -1) for own in gate_up}) > 1 or gate_up[0] not in inputs:
        return
    shapes = [_shape(module.get_submodule(own)) for own in (*found.gate_up, found.down)]
    products = [
        Linear(whole(some[0].inputs), _outputs(names, some), some[0].has_bias, place.at(name))
        for names, some in ((gate_up, shapes[:-1]), ([down], shapes[-1:]))
    ]
    _set(model, name, FusedMLP(products[0], products[1], found.activation))
    for own in (*gate_up, down):
        del inputs[own]


def _outputs(names: Sequence[str], shapes: Sequence[Shape]) -> dict[str, Shard]:
    return {name.rpartition(".")[2]: whole(shape.outputs) for name, shape in zip(names, shapes, strict=True)}


def _replace_linears(model: Model, parent: str, names: list[str], place: Placement) -> None:
    """Replace sibling layers that take the same tensor: those of equal bias and quantization become one product."""
    alike: dict[tuple[bool, bool], list[str]] = {}
    for name in names:
        is_quantized = place.quantization is not None and place.quantization.scheme_of(name) is not None
        alike.setdefault((_shape(model.get_submodule(name)).has_bias, is_quantized), []).append(name)
    for some in alike.values():
        shapes = [_shape(model.get_submodule(name)) for name in some]
        if len(some) == 1:
            _set(model, some[0], _linear(some, shapes, place, FlatLinear))
            continue
        joined = _linear(some, shapes, place, JoinedLinear)
        assert isinstance(joined, JoinedLinear)
        own = [name.rpartition(".")[2] for name in some]
        model.get_submodule(parent).add_module("_and_".join(own), joined)
        for name, part in zip(some, joined.share([shape.outputs for shape in shapes]), strict=True):
            _set(model, name, part)


def _linear(names: Sequence[str], shapes: Sequence[Shape], place: Placement, cls: type[FlatLinear]) -> FlatLinear:
    parent = names[0].rpartition(".")[0]
    return cls(whole(shapes[0].inputs), _outputs(names, shapes), shapes[0].has_bias, place.at(parent) if parent else place)


def _set(model: Model, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _with_plain_head(model: Model, place: Placement) -> Placement:
    """Exempt the head from --quantization, whatever its name; a head that is stored quantized stays quantized."""
    quantization, head = place.quantization, model.get_output_embeddings()
    names = {name for name, module in model.named_modules() if module is head}
    if quantization is None:
        return place

    def scheme_of(*layer: str) -> QuantizationScheme | None:
        scheme = quantization.scheme_of(*layer)
        return None if names.intersection(layer) and _rounds(scheme) else scheme

    return place._replace(quantization=quantization._replace(scheme_of=scheme_of))


def _rounds(scheme: QuantizationScheme | None) -> bool:
    """Whether the scheme is that of --quantization: it rounds weights that the checkpoint has as floats."""
    return isinstance(scheme, PackQuantized | Scaled) and scheme.from_floats


def _check_experts(name: str, place: Placement) -> None:
    """Raise QuantizationError for experts that would be quantized while loading; checkpoint.py refuses stored ones."""
    quantization = place.quantization
    if quantization is not None and _rounds(quantization.scheme_of(f"{name}.0")):
        raise QuantizationError(
            f"--quantization {quantization.method}: {name} is a mixture of experts that transformers' model computes with, "
            "whose weights stay floats: leave the flag out"
        )


def _replace_experts(module: nn.Module, place: Placement) -> None:
    act = recognised(module)
    if act is None:
        module.__dict__[EXPERTS] = transformers_own(module, place.device)
        return
    stacked = StackedExperts(module, act, place.dtype, place.device)
    for name in list(module._parameters):
        module._parameters.pop(name)
    module.add_module("stacked", stacked)
    module.__dict__[EXPERTS] = stacked


def _make_rest(model: Model, tied: dict[str, str], place: Placement) -> None:
    """Allocate the parameters that are left, with owners; move buffers to the device."""
    exact = _kept_in_float32(model, place.dtype)
    for name, module in list(model.named_modules()):
        own = {key: p for key, p in module._parameters.items() if p is not None and p.device.type == "meta"}
        if not own and not module._buffers:
            continue
        prefix = f"{name}." if name else ""
        dtypes = {key: torch.float32 if exact.search(prefix + key) else p.dtype for key, p in own.items()}
        shared = {key for key in own if prefix + key in tied}
        module.add_module("rest", Rest(module, place.device, dtypes, shared))
    for name, other in tied.items():
        (parent, _, key), (owner, _, theirs) = name.rpartition("."), other.rpartition(".")
        model.get_submodule(parent)._parameters[key] = model.get_submodule(owner)._parameters[theirs]


def _replace_tied_head(model: Model, recording: Recording, tied: dict[str, str], place: Placement) -> None:
    """Replace a head that is tied to an embedding by a Linear with the embedding's weight."""
    for call in recording.linears:
        weight = f"{call.module}.weight"
        if weight not in tied or f"{call.module}.bias" in tied:
            continue
        module = model.get_submodule(call.module)
        shape, parent = _shape(module), call.module.rpartition(".")[0]
        if shape.has_bias or not isinstance(module.weight, nn.Parameter) or module.weight.dtype != place.dtype:
            continue
        outputs = {call.module.rpartition(".")[2]: whole(shape.outputs)}
        at = place.at(parent) if parent else place
        _set(model, call.module, FlatLinear(whole(shape.inputs), outputs, False, at, tied_to=module.weight))


def _kept_in_float32(model: Model, dtype: torch.dtype) -> re.Pattern[str]:
    """Names of the parameters that transformers never rounds to this dtype."""
    words = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        words |= set(model._keep_in_fp32_modules or ())
    return re.compile("|".join(rf"(?:^|\.){word}(?:\.|$)" for word in sorted(words)) or r"(?!)")
