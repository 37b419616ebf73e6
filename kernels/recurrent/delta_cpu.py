"""Gated DeltaNet on the CPU: all decode rows at once, and prompts by chunks of 64 tokens.

Formulas and signature: delta_reference. Within a chunk the updates of the state depend on each other by a triangular system,

    (I + L) u = β (v - exp(c) k S),   L[i, j] = β_i k_i·k_j exp(c_i - c_j) for j < i,   c = cumulative sums of g

which is solved in float32 (arXiv:2412.06464, section 3.3). A chunk's operations have the same sizes wherever its row began, so
a state that was cut at a multiple of 64 has the bits of one that was not. A state in fewer bits is rounded after each chunk.

By channel, exp(c_i - c_j) stands within the product k_i·k_j, where it has to be split into factors of i and of j. Tokens of
different blocks of 16 have the end of the block before i's between them, so that no factor exceeds 1, however strong the decay;
tokens of one block are multiplied channel by channel. Sums are kept by block, so that none is large beside its parts.
"""

import torch

from quire.kernels.recurrent.delta_reference import (
    DeltaHeads,
    DeltaInputs,
    DeltaWeights,
    gated_norm,
    gates,
    kept_inputs,
    split_heads,
)
from quire.kernels.recurrent.rounding_cpu import rounded
from quire.kernels.recurrent.rows import BLOCK, CHUNK, FORGOTTEN, Rows
from quire.kernels.recurrent.windows_cpu import kept_turns, own_turns


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """y [T, Hv V]; states [N, Hv, K, V] are read and written."""
    y = torch.zeros((len(inputs.qkv), heads.value_size), dtype=inputs.qkv.dtype)
    if rows.windows is not None:
        _take_windows(inputs, weights, heads, states, rows, y)
    elif rows.has_decode:
        ids = rows.decoding()
        some = DeltaInputs(*(x[: len(ids)] for x in inputs))
        state, o = _token(some, weights, heads, states[ids].float())
        states[ids] = rounded(state, rows.positions[: len(ids)], states.dtype)
        y[: len(ids)] = gated_norm(o.to(y.dtype), some.z, weights, heads)
    if rows.has_prefill:
        chunk = _chunk_by_channel if heads.by_channel else _chunk
        for row in rows.chunks():
            state = states[row.first].float() if row.first else torch.zeros_like(states[0], dtype=torch.float32)
            for start in range(row.start, row.stop, CHUNK):
                part = slice(start, min(start + CHUNK, row.stop))
                some = DeltaInputs(
                    *(x[part].contiguous() for x in inputs)
                )  # vector units round otherwise than what is left over
                o, state = chunk(*split_heads(some.qkv, heads), *gates(some, weights, heads), state)
                last = rows.positions[part.stop - 1 : part.stop]
                state = rounded(state[None], last, states.dtype)[0].float()
                y[part] = gated_norm(o.to(y.dtype), some.z, weights, heads)
            for written in row.written:
                states[written] = state.to(states.dtype)
    return y


def _token(
    some: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each of some rows, state float32 [r, H, K, V] -> (the states behind them, o [r, H, V])."""
    (q, k, v), (g, beta) = split_heads(some.qkv, heads), gates(some, weights, heads)
    state = state * (g if heads.by_channel else g[:, :, None]).exp()[..., None]
    delta = (v - (state * k[..., None]).sum(2)) * beta[..., None]
    state += k[..., None] * delta[:, :, None, :]
    return state, (state * q[..., None]).sum(2)


def _take_windows(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows, y: torch.Tensor
) -> None:
    assert rows.windows is not None
    some, ids, kept = rows.kept_rows(), rows.decoding(), kept_inputs(rows.windows.inputs, heads)
    taken = states[ids]
    for turn in kept_turns(some, states, taken):
        state, _ = _token(DeltaInputs(*(x[turn.at] for x in kept)), weights, heads, taken[turn.rows].float())
        taken[turn.rows] = rounded(state, turn.positions, states.dtype)
    states[ids] = taken
    for turn in own_turns(some):
        token = DeltaInputs(*(x[turn.at] for x in inputs))
        state, o = _token(token, weights, heads, taken[turn.rows].float())
        taken[turn.rows] = rounded(state, turn.positions, states.dtype)
        y[turn.at] = gated_norm(o.to(y.dtype), token.z, weights, heads)
    base, count = int(rows.windows.base[0]), int(rows.query_start[len(some)])
    rows.windows.inputs[2][base : base + count] = torch.cat((inputs.b[:count], inputs.a[:count]), 1)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [n, H, K], v [n, H, V], g, beta [n, H], state [H, K, V] -> (o [n, H, V], the state after the chunk)."""
    q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    sums = g.cumsum(1)
    decay = torch.exp((sums[:, :, None] - sums[:, None, :]).tril()).tril()
    from_start = sums.exp()[..., None]
    system = (k * beta[..., None]) @ k.mT * decay
    right = beta[..., None] * (v - from_start * (k @ state))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = (q * from_start) @ state + (q @ k.mT * decay) @ u
    to_end = (sums[:, -1:] - sums).exp()[..., None]
    return o.transpose(0, 1), state * from_start[:, -1:] + (k * to_end).mT @ u


def _chunk_by_channel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As _chunk, with g [n, H, K]."""
    q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    sums = torch.cat([block.cumsum(1) for block in g.clamp(min=FORGOTTEN).split(BLOCK, 1)], 1)
    system, products = k.new_zeros(2, len(k), k.shape[1], k.shape[1]).unbind()
    start, to_end = (
        torch.zeros_like(g),
        torch.zeros_like(g),
    )  # exponents, the second to the end of what is done
    for first in range(0, k.shape[1], BLOCK):
        own, before = slice(first, min(first + BLOCK, k.shape[1])), slice(0, first)
        end = sums[:, own.stop - 1 : own.stop]
        within = torch.exp((sums[:, own, None] - sums[:, None, own]).clamp(max=0.0))
        from_block, earlier = sums[:, own].exp(), (k[:, before] * to_end[:, before].exp()).mT
        for x, into in ((k, system), (q, products)):
            into[:, own, before] = (x[:, own] * from_block) @ earlier
            into[:, own, own] = torch.einsum("hik,hjk,hijk->hij", x[:, own], k[:, own], within).tril()
        start[:, own] += sums[:, own]
        start[:, own.stop :] += end
        to_end[:, before] += end
        to_end[:, own] = end - sums[:, own]
    from_start = start.exp()
    right = beta[..., None] * (v - (k * from_start) @ state)
    u = torch.linalg.solve_triangular(system * beta[..., None], right, upper=False, unitriangular=True)
    o = (q * from_start) @ state + products @ u
    return o.transpose(0, 1), state * from_start[:, -1, :, None] + (k * to_end.exp()).mT @ u
