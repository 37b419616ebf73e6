"""Mamba 2's recurrence in plain torch: the oracle of `mamba`, token by token, with the same signature. arXiv:2405.21060.

For each head, with the B and C of its group, and Δ = softplus(dt + dt_bias), clamped:

    S = exp(-Δ exp(A_log)) S + B (Δ x)ᵀ;     S [N, P] is the head's state
    y = Sᵀ C + D x

Then y · silu(z) is normed, an RMSNorm of each group of channels; or the norm comes before the gate; or there is no norm; or,
without z, neither. All in float32, but y is rounded to the activations' dtype before.

With windows, states take the kept tokens that were accepted, and dt of this step's decode rows is kept in the third tensor; the
convolution has kept xbc in the second.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from quire.kernels.recurrent.rows import Rows


class MambaHeads(NamedTuple):
    """Heads of a layer on this rank. A group's B and C serve num_heads / num_groups consecutive heads."""

    num_groups: int
    num_heads: int
    state_size: int  # N
    head_dim: int  # P

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x|B|C."""
        return self.size + 2 * self.group_size


class MambaInputs(NamedTuple):
    """Inputs of T tokens and H heads, in the activations' dtype. Their rows may lie apart."""

    xbc: torch.Tensor  # [T, channels], behind the convolution
    z: torch.Tensor | None  # [T, H P]; None: y is neither gated nor normed
    dt: torch.Tensor  # [T, H]


class MambaWeights(NamedTuple):
    a_log: torch.Tensor  # float32 [H]
    dt_bias: torch.Tensor  # float32 [H]
    d: torch.Tensor  # float32 [H]
    norm: torch.Tensor | None  # [H P]; None: there is no norm
    eps: float
    norm_size: int  # channels that are normed together
    norms_first: bool = False  # the norm comes before the gate
    dt_min: float = 0.0
    dt_max: float = float("inf")


def split_groups(xbc: torch.Tensor, heads: MambaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H, P], B and C [T, H, N], in float32."""
    x, b, c = xbc.float().split((heads.size, heads.group_size, heads.group_size), 1)
    each = heads.num_heads // heads.num_groups
    b, c = (t.unflatten(1, (heads.num_groups, heads.state_size)).repeat_interleave(each, 1) for t in (b, c))
    return x.unflatten(1, (heads.num_heads, heads.head_dim)), b, c


def steps(dt: torch.Tensor, weights: MambaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """(Δ, logarithm of the decay), float32 [T, H]."""
    delta = F.softplus(dt.float() + weights.dt_bias.float()).clamp(weights.dt_min, weights.dt_max)
    return delta, -delta * weights.a_log.float().exp()


def gated_norm(y: torch.Tensor, z: torch.Tensor | None, weights: MambaWeights) -> torch.Tensor:
    """y, z [T, H P] -> [T, H P]"""
    if z is None:
        return y
    wide, gate = y.float(), F.silu(z.float())
    if weights.norm is None:
        return (wide * gate).to(y.dtype)
    if not weights.norms_first:
        wide = wide * gate
    grouped = wide.unflatten(1, (-1, weights.norm_size))
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + weights.eps)
    wide = normed.flatten(1) * weights.norm.float()
    return (wide * gate if weights.norms_first else wide).to(y.dtype)


def mamba(inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """y [T, H P]; states [N, H, N, P] are read and written. A state in fewer bits is rounded after each token."""
    next_y, y = _recurrence(inputs, weights, heads)
    starts = rows.query_start.tolist()
    if rows.windows is not None:
        _windows(inputs, weights, heads, states, rows, next_y)
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
            state = next_y(t, state).to(states.dtype).float()
        states[own] = state.to(states.dtype)
        if last:
            states[last] = state.to(states.dtype)
    return gated_norm(y.flatten(1), inputs.z, weights)


Step = Callable[[int, torch.Tensor], torch.Tensor]  # (token, the state before it) -> the state behind it


def _recurrence(inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads) -> tuple[Step, torch.Tensor]:
    """A function that takes a token and writes its y, and these y [T, H, P]."""
    (x, b, c), (delta, decay) = split_groups(inputs.xbc, heads), steps(inputs.dt, weights)
    y = torch.zeros(x.shape, dtype=inputs.xbc.dtype)

    def step(t: int, state: torch.Tensor) -> torch.Tensor:
        state = state * decay[t].exp()[:, None, None] + b[t][:, :, None] * (x[t] * delta[t][:, None])[:, None, :]
        out = torch.einsum("hnp,hn->hp", state, c[t]) + weights.d.float()[:, None] * x[t]
        y[t] = out.to(y.dtype)
        return state

    return step, y


def _windows(
    inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows, next_y: Step
) -> None:
    assert rows.windows is not None
    kept, base = rows.windows.inputs, int(rows.windows.base[0])
    take, _ = _recurrence(MambaInputs(kept[1], None, kept[2]), weights, heads)
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
            state = next_y(t, state).to(states.dtype).float()
            kept[2][base + t] = inputs.dt[t]
