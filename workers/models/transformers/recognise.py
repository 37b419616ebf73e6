"""Finds modules of a transformers model that compute the same as modules of ours, by trying them on random numbers.

A module is never recognized by its name. It is copied with random parameters, smaller if possible, and its output is compared
with that of our module. A module that cannot be tried (other arguments, other children) stays as it is.
"""

import copy
import inspect
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.kernels.elementwise import activation_cpu, norm_reference
from quire.kernels.elementwise.activation_cpu import Activation
from quire.kernels.elementwise.norm_reference import Weighs

SIZE, INNER = 8, 12  # of a tried MLP
LAST_BITS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # tolerances: a LayerNorm adds in another order
WEIGHS: tuple[Weighs, ...] = ("rounded", "wide", "plus_one")


class RMSNormFound(NamedTuple):
    size: int
    eps: float
    weighs: Weighs


class LayerNormFound(NamedTuple):
    size: int
    eps: float
    has_bias: bool


class GatedMLPFound(NamedTuple):
    """down(activation(gate(x)) * up(x)). gate_up: two names, or the name of one layer with gate's, then up's outputs."""

    gate_up: tuple[str, ...]
    down: str
    activation: Activation


def rms_norm_of(module: nn.Module, dtype: torch.dtype) -> RMSNormFound | None:
    """The RMSNorm, with a weight, that the module is; `weighs` is how it rounds in this dtype. None: it is none."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or not _is_leaf(module) or not _takes_one(module):
        return None
    tried = _with_parameters(module, dtype)
    x = 3 * torch.randn(7, len(weight), generator=_generator()).to(dtype)
    theirs = _called(tried, x)
    if theirs is None or theirs.shape != x.shape or theirs.dtype != dtype:
        return None
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}):
        for weighs in WEIGHS:
            ours = norm_reference.rms_norm(x, tried._parameters["weight"], eps, weighs=weighs)  # type: ignore[arg-type]
            if _is_close(theirs, ours):
                return RMSNormFound(len(weight), eps, weighs)
    return None


def layer_norm_of(module: nn.Module, dtype: torch.dtype) -> LayerNormFound | None:
    """The LayerNorm over the last dimension that the module is, with a weight and maybe a bias. None: it is none."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or not set(own) <= {"weight", "bias"} or not _is_leaf(module):
        return None
    if any(p.shape != weight.shape for p in own.values()) or not _takes_one(module):
        return None
    tried = _with_parameters(module, dtype)
    x = 3 * torch.randn(7, len(weight), generator=_generator()).to(dtype) + 1
    theirs, bias = _called(tried, x), tried._parameters.get("bias")
    if theirs is None or theirs.shape != x.shape or theirs.dtype != dtype:
        return None
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}):
        ours = norm_reference.layer_norm(x, tried._parameters["weight"], eps, bias=bias)
        close = LAST_BITS[dtype]
        if torch.allclose(theirs.float(), ours.float(), rtol=close, atol=close):
            return LayerNormFound(len(weight), eps, bias is not None)
    return None


def gated_mlp_of(module: nn.Module) -> GatedMLPFound | None:
    """The MLP that the module is: of two or three linear layers only, all with biases or all without. None: it is none."""
    names = [name for name, child in module.named_children() if type(child) is nn.Linear]
    others = [child for child in module.children() if type(child) is not nn.Linear]
    if len(names) not in (2, 3) or module._parameters or not _takes_one(module) or any(list(c.parameters()) for c in others):
        return None
    if len({module.get_submodule(name).bias is None for name in names}) > 1:
        return None
    x = torch.randn(5, SIZE, generator=_generator())
    for order in permutations(names):
        *gate_up, down = order
        tried = _small_mlp(module, gate_up, down)
        theirs = None if tried is None else _called(tried, x)
        if tried is None or theirs is None or theirs.shape != x.shape:
            continue
        h = torch.cat([tried.get_submodule(name)(x) for name in gate_up], -1)
        for activation in activation_cpu.ACTIVATIONS:
            if _is_close(theirs, tried.get_submodule(down)(activation_cpu.activate_mul(h, activation=activation))):
                return GatedMLPFound(tuple(gate_up), down, activation)
    return None


def _small_mlp(module: nn.Module, gate_up: list[str], down: str) -> nn.Module | None:
    """A copy with small layers, if the module's layers have the shapes of an MLP; else None."""
    shapes = {name: tuple(module.get_submodule(name).weight.shape) for name in (*gate_up, down)}  # type: ignore[arg-type, operator]
    inner, outputs = shapes[down][1], shapes[down][0]
    if any(shapes[name] != (2 * inner // len(gate_up), outputs) for name in gate_up):
        return None
    small = copy.deepcopy(module)
    for name in (*gate_up, down):
        sizes = (INNER, SIZE) if name == down else (SIZE, 2 * INNER // len(gate_up))
        has_bias = module.get_submodule(name).bias is not None
        layer = nn.Linear(*sizes, bias=has_bias)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=_generator(len(name)))
        setattr(small, name, layer)
    return small.train(False)


def _with_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    tried = copy.deepcopy(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = torch.randn(parameter.shape, generator=_generator(1)).to(dtype)
            tried._parameters[name] = nn.Parameter(values, requires_grad=False)
    return tried


def _called(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.inference_mode():
            out: Any = module(x)
    except Exception:  # transformers' code may raise anything on unexpected input: then the module is something else
        return None
    return out if isinstance(out, torch.Tensor) else None


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In 16 bits equal to the last bit, which shows at which point a product is rounded."""
    return torch.equal(a, b) if a.dtype != torch.float32 else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def _is_leaf(module: nn.Module) -> bool:
    return not module._modules and not module._buffers


def _takes_one(module: nn.Module) -> bool:
    parameters = list(inspect.signature(module.forward).parameters.values())
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
