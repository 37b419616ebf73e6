"""The functions that layers are made of, dispatched by the tensor's device: our Triton kernels on CUDA, torch on the CPU.

Triton is imported for the first CUDA tensor, so a CPU worker never imports it. No function here synchronizes with the device
or branches on data, so a forward pass made of them can be captured in a CUDA graph.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.elementwise import activation_cpu, norm_cpu, norm_reference
from quire.kernels.elementwise.activation_cpu import Activation
from quire.kernels.elementwise.norm_reference import Weighs
from quire.kernels.experts import experts_reference, routing_reference
from quire.kernels.experts.experts_reference import Act, Weights
from quire.kernels.experts.routing_reference import Counting, Routing
from quire.kernels.lora.tables import Shrink
from quire.workers.layers.unadded import Unadded, settled
from quire.workers.parallel import Partial


class _Kernels(NamedTuple):
    activation: ModuleType
    dependent_launch: ModuleType
    embedding: ModuleType
    experts: ModuleType
    linear: ModuleType
    logits: ModuleType
    norm: ModuleType
    norm_linear: ModuleType
    routing: ModuleType
    shrinking: ModuleType
    split_linear: ModuleType


@functools.cache
def _kernels() -> _Kernels:
    from quire.kernels.elementwise import activation, embedding, logits, norm
    from quire.kernels.experts import experts, routing
    from quire.kernels.linear import linear, norm_linear, shrinking, split_linear
    from quire.kernels.triton_support import dependent_launch

    small = activation, dependent_launch, embedding, experts, linear, logits, norm
    return _Kernels(*small, norm_linear, routing, shrinking, split_linear)


def _launch_mode(x: torch.Tensor) -> int:
    return _kernels().dependent_launch.mode_for(len(x))


def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale · rows of weight [vocab, H] by ids int32 [T] -> [T, H]."""
    if ids.is_cuda:
        return _kernels().embedding.embedding(ids, weight, scale)
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows.mul_(scale)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, weighs: Weighs = "rounded"
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32; x [T, H], weight [H].

    `out` receives the result and may be x itself.
    """
    if x.is_cuda:
        return _kernels().norm.rms_norm(x, weight, eps, out, weighs=weighs, pdl=_launch_mode(x))
    return norm_cpu.rms_norm(x, weight, eps, out, weighs=weighs)


def _pdl_of_add(x: torch.Tensor) -> int:
    """The launch mode of an addition; x may be the partial sums of `linear_split_k`."""
    return _kernels().dependent_launch.mode_for_split_k(x.shape[1]) if x.dim() == 3 else _launch_mode(x)


def add_rms_norm(
    x: torch.Tensor | Partial | Unadded,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scale: float = 1.0,
    weighs: Weighs = "rounded",
) -> torch.Tensor:
    """residual += scale · x in place; returns the norm of the new residual.

    x, residual [T, H]; x may be partial sums of `linear_split_k`, or a Partial, and then its sum over the ranks is added, or
    Unadded.
    """
    if isinstance(x, Partial):
        assert scale == 1.0 and weighs == "rounded", "only plain norms exchange"
        return x.exchange.add_rms_norm(x.x, residual, weight, eps)
    term = None
    if isinstance(x, Unadded):
        x, term = (x.x, x.term) if x.x.is_cuda else (x.settled(), None)
    if x.is_cuda:
        how = {"scale": scale, "weighs": weighs, "term": term, "pdl": _pdl_of_add(x)}
        return _kernels().norm.add_rms_norm(x, residual, weight, eps, **how)
    return norm_cpu.add_rms_norm(x, residual, weight, eps, scale=scale, weighs=weighs)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """LayerNorm over the last dimension; x [T, H], weight and bias [H]; or x [T, N, H], weight [N, H] of N heads."""
    if x.is_cuda:
        return _kernels().norm.layer_norm(x, weight, eps, out, bias=bias, pdl=_launch_mode(x))
    return norm_cpu.layer_norm(x, weight, eps, out, bias=bias)


def add_layer_norm(
    x: torch.Tensor | Unadded,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Like add_rms_norm, with a LayerNorm."""
    given = settled(x)
    if given.is_cuda:
        return _kernels().norm.add_layer_norm(given, residual, weight, eps, bias=bias, scale=scale, pdl=_pdl_of_add(given))
    return norm_cpu.layer_norm(norm_reference.add(given, residual, scale), weight, eps, bias=bias)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [T, 2I] = gate|up, giving [T, I]."""
    return activate_mul(gate_up, "silu")


def activate_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) · up of gate_up [T, 2I] = gate|up, giving [T, I]."""
    if gate_up.is_cuda:
        return _kernels().activation.activate_mul(gate_up, activation=activation, pdl=_launch_mode(gate_up))
    return activation_cpu.activate_mul(gate_up, activation=activation)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(x) for x [T, I], possibly in place."""
    if x.is_cuda:
        return _kernels().activation.activate(x, x, activation=activation, pdl=_launch_mode(x))
    return activation_cpu.activate(x, activation=activation)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(gate), possibly in place; x [T, I], gate [T, I] or [T, 1]."""
    if x.is_cuda:
        return _kernels().activation.times_sigmoid(x, gate, pdl=_launch_mode(x))
    return x.mul_(torch.sigmoid(gate))


def shape_logits(logits: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """softcap · tanh(scale · logits / softcap) in place; softcap 0: no cap; logits [R, V]."""
    if logits.is_cuda:
        return _kernels().logits.shape_logits(logits, scale, softcap)
    if scale != 1.0:
        logits.mul_(scale)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias; x [T, in], weight [out, in], bias [out]. On CUDA few rows run on our kernels, more on cuBLAS.

    `out` [T, out] receives the result.
    """
    if x.is_cuda:
        return _kernels().linear.skinny_linear(x, weight, bias, out, pdl=_launch_mode(x))
    y = F.linear(x, weight, bias)
    return y if out is None else out.copy_(y)


def norm_takes_term(width: int, rank: int) -> bool:
    """Whether `add_rms_norm` takes an Unadded x of so many columns and an adapter's R."""
    return _kernels().norm.takes_term(width, rank)  # type: ignore[no-any-return]


def splits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_split_k` supports these and is faster than `linear`: some rows, few columns, on CUDA."""
    return x.is_cuda and _kernels().split_linear.pays(x, weight)


def linear_split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 partial sums [S, T, out]; `add_rms_norm` adds them up to what `linear` returns."""
    return _kernels().split_linear.split_linear(x, weight, bias, dependents=_kernels().dependent_launch.supported())


def shrinking_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, shrink: Shrink, splits_k: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(`linear`, h of an adapter or its partial sums), in one kernel on CUDA; None: no kernel computes both for these.

    splits_k: `linear_split_k` in place of `linear` where `splits` says so, without `out`.
    """
    if not x.is_cuda:
        return None
    if splits_k and splits(x, weight):
        dependents = _kernels().dependent_launch.supported()
        return _kernels().shrinking.shrinking_split_linear(x, weight, bias, shrink, dependents=dependents)  # type: ignore[no-any-return]
    return _kernels().shrinking.shrinking_linear(x, weight, bias, out, shrink, pdl=_launch_mode(x))  # type: ignore[no-any-return]


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up of gate|up = x Wᵀ + bias; x [T, in], weight [2I, in] -> [T, I]. One kernel for few rows on CUDA."""
    if x.is_cuda:
        return _kernels().linear.skinny_gated(x, weight, bias, pdl=_launch_mode(x))
    return silu_mul(F.linear(x, weight, bias))


def fuses_norm(residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm_linear` supports these and is faster than a norm and a product: one row, a small weight, on CUDA."""
    return residual.is_cuda and _kernels().norm_linear.pays(residual, weight)


def norm_linear(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool = False,
    *,
    shrink: Shrink | None = None,
    h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(norm(residual + x)), residual + x), the first gated if is_gated; the residual is not changed in place.

    shrink: an adapter of the product; `h` of its `new_h` receives what `expand` needs.
    """
    adapter = {"shrink": shrink, "adapter_h": h, "pdl": _launch_mode(residual)}
    return _kernels().norm_linear.norm_linear(x, residual, norm_weight, eps, weight, bias, is_gated=is_gated, **adapter)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
    held: tuple[int, int] | None = None,
    counting: Counting | None = None,
    adapter: Callable[[torch.Tensor], object] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts for x [T, H], ids int32 [T, k] and weights float32 [T, k], by a router's weight [E, H] and bias [E].

    held: (first, count) of this rank's experts. Ids are then numbers among these, and `count` is an expert of another rank.
    adapter: adds to logits float32 [T, E] in place.
    """
    if x.is_cuda:
        kernels, mode = _kernels().routing, _launch_mode(x)
        if adapter is not None:
            logits = kernels.router_logits(x, weight, pdl=mode)
            adapter(logits[0])
            return kernels.route(logits, routing, bias, correction, held=held, counting=counting)  # type: ignore[no-any-return]
        return kernels.router(x, weight, routing, bias, correction, held=held, counting=counting, pdl=mode)  # type: ignore[no-any-return]
    logits = F.linear(x.float(), weight, bias)
    if adapter is not None:
        adapter(logits)
    ids, weights = routing_reference.route(logits, routing, correction)
    if counting is not None:
        routing_reference.count(ids, counting)
    return ids if held is None else routing_reference.own_ids(ids, *held), weights


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    num_routed: int = 0,
) -> torch.Tensor:
    """The weighted sum of the experts' results [T, H], plus `shared`; x [T, H], ids and weights of `route`.

    num_routed: the number of all experts if w has some of them, 0 if it has all.
    """
    if x.is_cuda:
        mode = _launch_mode(x)
        return _kernels().experts.experts(x, w, ids, weights, act, shared, num_routed=num_routed, pdl=mode)  # type: ignore[no-any-return]
    return experts_reference.experts(x, w, ids, weights, act, shared, num_routed=num_routed)
