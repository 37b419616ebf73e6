"""Gated DeltaNet in plain torch: the oracle of `delta`, token by token, with the same signature. Yang et al., arXiv:2412.06464.

For each value head, with the q and k of its key head normalized (L2, eps 1e-6) and q scaled by K^-½:

    S = exp(g) S,   g = -exp(A_log) softplus(a + dt_bias);     S [K, V] is the head's state
    S = S + k βᵀ(v - Sᵀk),   β = sigmoid(b);                   o = Sᵀ q
    y = norm(o) · silu(z),   an RMSNorm of the head with a plain weight

Kimi Delta Attention (arXiv:2510.26692) is the variant `by_channel`: g has a value for each of the K channels of a head's keys,
which decays that row of S, and the gate is sigmoid(z) in place of silu(z).

All in float32, but o is rounded to the activations' dtype before the norm.

With windows, states take the kept tokens that were accepted, and b and a of this step's decode rows are kept in the third
tensor, side by side; the convolution has kept qkv in the second.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from quire.kernels.recurrent.rows import Rows

L2_EPS = 1e-6


class DeltaHeads(NamedTuple):
    """Heads of a layer on this rank. A key head serves num_values / num_keys consecutive value heads."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    by_channel: bool = False  # the decay has a value for each key channel, and the output's gate is a sigmoid

    @property
    def num_decays(self) -> int:
        """D of a token."""
        return self.num_values * (self.key_dim if self.by_channel else 1)

    @property
    def key_size(self) -> int:
        return self.num_keys * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_values * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q|k|v."""
        return 2 * self.key_size + self.value_size


class DeltaInputs(NamedTuple):
    """Inputs of T tokens and Hv value heads, in the activations' dtype. Their rows may lie apart."""

    qkv: torch.Tensor  # [T, channels], behind the convolution
    z: torch.Tensor  # [T, Hv V]
    b: torch.Tensor  # [T, Hv]
    a: torch.Tensor  # [T, D]


class DeltaWeights(NamedTuple):
    a_log: torch.Tensor  # float32 [Hv]
    dt_bias: torch.Tensor  # float32 [D]
    norm: torch.Tensor  # [V]
    eps: float  # of the norm


def split_heads(qkv: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [T, Hv, K], normalized, and v [T, Hv, V], in float32."""
    wide, ends = qkv.float(), (heads.key_size, heads.key_size, heads.value_size)
    q, k, v = wide.split(ends, 1)
    q, k = (x.unflatten(1, (heads.num_keys, heads.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads.num_values // heads.num_keys, 1) for x in (q, k))
    return q * heads.key_dim**-0.5, k, v.unflatten(1, (heads.num_values, heads.value_dim))


def gates(inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """g, float32 [T, Hv], or [T, Hv, K] by channel; and β [T, Hv]."""
    g, rate = F.softplus(inputs.a.float() + weights.dt_bias.float()), -weights.a_log.float().exp()
    g = g.unflatten(1, (heads.num_values, -1)) * rate[:, None] if heads.by_channel else rate * g
    return g, inputs.b.float().sigmoid()


def gated_norm(o: torch.Tensor, z: torch.Tensor, weights: DeltaWeights, heads: DeltaHeads) -> torch.Tensor:
    """o [T, Hv, V], z [T, Hv V] -> [T, Hv V]"""
    wide = o.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.float()
    return (normed.flatten(1) * (torch.sigmoid if heads.by_channel else F.silu)(z.float())).to(o.dtype)


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """y [T, Hv V]; states [N, Hv, K, V] are read and written. A state in fewer bits is rounded after each token."""
    next_o, o = _recurrence(inputs, weights, heads)
    starts = rows.query_start.tolist()
    if rows.windows is not None:
        _windows(inputs, weights, heads, states, rows, next_o)
    for row in range(len(rows.own)):
        is_decode = row < int(rows.decode_limit[0])
        if is_decode and rows.windows is not None:
            continue
        own, last = int(rows.own[row]), 0 if is_decode else int(rows.last[row])
        first = own if is_decode else int(rows.first[row])
        if starts[row] == starts[row + 1]:
            continue
        state = states[first].float() if first else torch.zeros_like(states[0], dtype=torch.float32)
        for t in range(starts[row], starts[row + 1]):
            state = next_o(t, state).to(states.dtype).float()
        states[own] = state.to(states.dtype)
        if last:
            states[last] = state.to(states.dtype)
    return gated_norm(o, inputs.z, weights, heads)


Step = Callable[[int, torch.Tensor], torch.Tensor]  # (token, the state before it) -> the state behind it


def _recurrence(inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads) -> tuple[Step, torch.Tensor]:
    """A function that takes a token and writes its o, and these o [T, Hv, V]."""
    (q, k, v), (g, beta) = split_heads(inputs.qkv, heads), gates(inputs, weights, heads)
    decays = (g if heads.by_channel else g[:, :, None]).exp()[..., None]  # of S's rows
    o = torch.zeros(v.shape, dtype=inputs.qkv.dtype)

    def step(t: int, state: torch.Tensor) -> torch.Tensor:
        state = state * decays[t]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        o[t] = torch.einsum("hkv,hk->hv", state, q[t]).to(o.dtype)
        return state

    return step, o


def kept_inputs(kept: tuple[torch.Tensor, ...], heads: DeltaHeads) -> DeltaInputs:
    """The inputs that are kept of a layer's tokens; z is not."""
    b, a = kept[2].split((heads.num_values, heads.num_decays), 1)
    return DeltaInputs(kept[1], kept[1][:, :0], b, a)


def _windows(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows, next_o: Step
) -> None:
    assert rows.windows is not None
    kept, base = rows.windows.inputs, int(rows.windows.base[0])
    take, _ = _recurrence(kept_inputs(kept, heads), weights, heads)
    for row in rows.kept_rows():
        state = states[row.own].float()
        if row.leaves == 0:
            states[row.keep_state] = states[row.own]
        for count, at in enumerate(range(row.first, row.end), 1):
            state = take(at, state).to(states.dtype).float()
            if count == row.leaves:
                states[row.keep_state] = state.to(states.dtype)
        states[row.own] = state.to(states.dtype)
        for t in range(row.start, row.stop):
            state = next_o(t, state).to(states.dtype).float()
            kept[2][base + t] = torch.cat((inputs.b[t], inputs.a[t]))
