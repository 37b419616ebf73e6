"""A layer's experts in plain torch: the oracle of the kernels beside it, the CPU path, and the order of pairs (`align`).

    out[t] = Σ_j weights[t, j] · (down[e] · act(gate_up[e] · x[t] + b[e]) + b'[e]),   e = ids[t, j]

x [T, H], gate_up [E, 2 I, H] (gate's rows, then up's), down [E, H, I], biases [E, 2 I] and [E, H] or none, weights float32
[T, k].
    act(g | u) = g' · sigmoid(α (g' + cubic g'³)) · (u' + offset),    g' = min(g, limit), u' between ±limit

which is silu(g) · u with `SwiGLU`'s defaults, and gelu(g) · u, by tanh, with α √(8 / π) and cubic 0.044715. Experts without a
gate have `Relu2`, act(u) = max(u, 0)², or `Gelu`, the exact one, and gate_up is [E, I, H], up's rows alone, as are its biases
[E, I]. With expert parallelism, id E means an expert on another rank and contributes zero. Products are rounded to x's dtype,
as in torch; the sum over j is in float32, in the order of j, with `shared` [T, H] first, if given. A row's result depends on no
other row, except for last bits of torch's product of an expert's rows.
"""

from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F

from quire.kernels.elementwise import activation_cpu


class SwiGLU(msgspec.Struct, frozen=True, kw_only=True):
    """The activation between the two products."""

    limit: float = 0.0  # 0: no limit
    alpha: float = 1.0
    offset: float = 0.0
    cubic: float = 0.0


class Relu2(msgspec.Struct, frozen=True):
    """The activation of experts without a gate."""


class Gelu(msgspec.Struct, frozen=True):
    """The other activation of experts without a gate."""


Act = SwiGLU | Relu2 | Gelu


def is_gated(act: Act) -> bool:
    return isinstance(act, SwiGLU)


class Weights(NamedTuple):
    """All experts of a layer, or one rank's: a shard of each (tensor parallelism), or some of them (expert parallelism)."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def activate(gate_up: torch.Tensor, act: Act) -> torch.Tensor:
    """[T, 2 I] = gate | up -> [T, I]; without a gate, [T, I] -> [T, I]."""
    if isinstance(act, Relu2):
        return activation_cpu.activate(gate_up, activation="relu2")
    if isinstance(act, Gelu):
        return activation_cpu.activate(gate_up, activation="gelu")
    gate, up = gate_up.chunk(2, -1)
    if act == SwiGLU():
        return F.silu(gate).mul_(up)
    gate, up = gate.float(), up.float()
    if act.limit:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    inner = gate + act.cubic * gate**3 if act.cubic else gate
    return (gate * torch.sigmoid(act.alpha * inner) * (up + act.offset)).to(gate_up.dtype)


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None = None,
    *,
    num_routed: int = 0,
) -> torch.Tensor:
    """[T, H] of the module's formula; num_routed: with expert parallelism, the number of all experts; 0: w holds them all."""
    top_k = ids.shape[1]
    new = torch.zeros if num_routed else torch.empty
    parts = new(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    flat, order = ids.flatten().sort(stable=True)
    experts, counts = flat.unique_consecutive(return_counts=True)
    scale = weights.flatten()
    for expert, pairs in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        if expert == len(w.gate_up):
            continue
        rows = pairs // top_k
        bias, down_bias = (None if b is None else b[expert] for b in (w.gate_up_bias, w.down_bias))
        h = activate(F.linear(x.index_select(0, rows), w.gate_up[expert], bias), act)
        y = F.linear(h, w.down[expert], down_bias)
        parts.view(-1, x.shape[1])[pairs] = y.float() * scale[pairs, None]
    out = parts[:, 0] if shared is None else parts[:, 0].add_(shared)
    for j in range(1, top_k):
        out += parts[:, j]
    return out.to(x.dtype)


def align(ids: torch.Tensor) -> torch.Tensor:
    """Pairs ordered by expert, within an expert by row: int32 [T k]."""
    return ids.flatten().sort(stable=True).indices.int()
