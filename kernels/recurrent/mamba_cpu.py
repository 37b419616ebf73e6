"""Mamba 2's recurrence on the CPU: all decode rows at once, and prompts by chunks of 64 tokens (arXiv:2405.21060, section 6).

Formulas and signature: mamba_reference. As in delta_cpu, a state that was cut at a multiple of 64 has the bits of one that was
not, and a state in fewer bits is rounded after each chunk.
"""

import torch

from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights, gated_norm, split_groups, steps
from quire.kernels.recurrent.rounding_cpu import rounded
from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.windows_cpu import kept_turns, own_turns


def mamba(inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """y [T, H P]; states [N, H, N, P] are read and written."""
    y = torch.zeros((len(inputs.xbc), heads.size), dtype=inputs.xbc.dtype)
    d = weights.d.float()[:, None]
    if rows.windows is not None:
        _take_windows(inputs, weights, heads, states, rows, y)
    elif rows.has_decode:
        ids = rows.decoding()
        some = _tokens(inputs, slice(len(ids)))
        state, out = _token(some, weights, heads, states[ids].float())
        states[ids] = rounded(state, rows.positions[: len(ids)], states.dtype)
        y[: len(ids)] = gated_norm(out.to(y.dtype), some.z, weights)
    if rows.has_prefill:
        for row in rows.chunks():
            state = states[row.first].float() if row.first else torch.zeros_like(states[0], dtype=torch.float32)
            for start in range(row.start, row.stop, CHUNK):
                part = slice(start, min(start + CHUNK, row.stop))
                some = _tokens(inputs, part)
                x, b, c = split_groups(some.xbc, heads)
                out, state = _chunk(x, b, c, *steps(some.dt, weights), state)
                last = rows.positions[part.stop - 1 : part.stop]
                state = rounded(state[None], last, states.dtype)[0].float()
                y[part] = gated_norm((out + d * x).flatten(1).to(y.dtype), some.z, weights)
            for written in row.written:
                states[written] = state.to(states.dtype)
    return y


def _token(
    some: MambaInputs, weights: MambaWeights, heads: MambaHeads, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each of some rows, state float32 [r, H, N, P] -> (the states behind them, y [r, H P])."""
    (x, b, c), (delta, decay) = split_groups(some.xbc, heads), steps(some.dt, weights)
    state = state * decay.exp()[:, :, None, None]
    state += b[..., None] * (x * delta[..., None])[:, :, None, :]
    return state, ((state * c[..., None]).sum(2) + weights.d.float()[:, None] * x).flatten(1)


def _take_windows(
    inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows, y: torch.Tensor
) -> None:
    assert rows.windows is not None
    some, ids, (_, xbc, dt) = rows.kept_rows(), rows.decoding(), rows.windows.inputs
    taken = states[ids]
    for turn in kept_turns(some, states, taken):
        token = MambaInputs(xbc[turn.at], None, dt[turn.at])
        taken[turn.rows] = rounded(_token(token, weights, heads, taken[turn.rows].float())[0], turn.positions, states.dtype)
    states[ids] = taken
    for turn in own_turns(some):
        token = _tokens(inputs, turn.at)
        state, out = _token(token, weights, heads, taken[turn.rows].float())
        taken[turn.rows] = rounded(state, turn.positions, states.dtype)
        y[turn.at] = gated_norm(out.to(y.dtype), token.z, weights)
    base, count = int(rows.windows.base[0]), int(rows.query_start[len(some)])
    dt[base : base + count] = inputs.dt[:count]


def _tokens(inputs: MambaInputs, part: slice | torch.Tensor) -> MambaInputs:
    """Inputs of some tokens, contiguous: vector units round otherwise than what is left over."""
    xbc, z, dt = (None if x is None else x[part].contiguous() for x in inputs)
    assert xbc is not None and dt is not None
    return MambaInputs(xbc, z, dt)


def _chunk(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, delta: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, H, P], b, c [n, H, N], delta, decay [n, H], state [H, N, P] -> (y [n, H, P], the state after the chunk)."""
    x, b, c, delta, decay = (t.transpose(0, 1) for t in (x, b, c, delta, decay))
    sums, x = decay.cumsum(1), x * delta[..., None]
    within = torch.exp((sums[:, :, None] - sums[:, None, :]).tril()).tril()
    from_start = sums.exp()[..., None]
    y = (c * from_start) @ state + (c @ b.mT * within) @ x
    to_end = (sums[:, -1:] - sums).exp()[..., None]
    return y.transpose(0, 1), state * from_start[:, -1:] + (b * to_end).mT @ x
