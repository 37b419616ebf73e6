"""Gated DeltaNet of decode rows with windows: the kept tokens that were accepted, then those of the step. One launch.

A program has a row's value head. It reads the head's state [K, V] once, applies what was accepted, writes it once, and goes on
with the step's own tokens, whose states it forgets: b and a are kept of them, and the convolution has kept q|k|v. A state in
fewer bits is rounded after each token, as without windows. Reference: `delta_reference.gated_delta`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import delta_reference
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.gates import decay, gated, l2_normed
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.windows import kept_row, num_programs, tables_of


@triton.jit
def _behind(
    state, qkv, b_ptr, a_ptr, a_log, bias, head, i, j, l2_eps, KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The head's state behind a token. Pointers: to the token's q|k|v, to b of all heads and to its a."""
    key = qkv + (KEYS + head // (VALUES // KEYS)) * K + i
    k = l2_normed(tl.load(key, i < K, other=0.0).to(tl.float32), l2_eps, 0)
    v = tl.load(qkv + 2 * KEYS * K + head * V + j, j < V, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b_ptr + head).to(tl.float32))
    if BY_CHANNEL:
        state *= tl.exp(decay(tl.load(a_ptr + head * K + i, i < K, other=0.0), a_log, bias))[:, None]
    else:
        state *= tl.exp(decay(tl.load(a_ptr + head), a_log, bias))
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * delta[None, :]


@triton.jit(do_not_specialize=["T", "num_inputs"])
def _windows_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, states_ptr, kept_ptr, gates_ptr, y_ptr, query_start_ptr,
    limit_ptr, base_ptr, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, qkv_stride,
    z_stride, b_stride, a_stride, states_stride, eps, l2_eps, scale, num_inputs, T,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_2: tl.constexpr, V_2: tl.constexpr,
    BY_CHANNEL: tl.constexpr, FILLS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, K_2), tl.arange(0, V_2)
    y_ptrs = y_ptr + head * V + j
    limit = tl.load(limit_ptr)
    if row >= limit:
        if FILLS:  # tokens of no row: there are no more of them than rows without tokens
            token = (tl.load(query_start_ptr + limit) + row - limit).to(tl.int64)
            tl.store(y_ptrs + token * (VALUES * V), tl.zeros([V_2], y_ptr.dtype.element_ty), (j < V) & (token < T))
        return
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    own, first, count, begin, position, leaves, left = kept_row(
        row, start, stop, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, num_inputs
    )  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEYS * K + VALUES * V
    GATES: tl.constexpr = VALUES + (VALUES * K if BY_CHANNEL else VALUES)
    a_log = tl.load(a_log_ptr + head)
    if BY_CHANNEL:
        bias = tl.load(dt_bias_ptr + head * K + i, i < K, other=0.0)
    else:
        bias = tl.load(dt_bias_ptr + head)
    element = head * (K * V) + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    state_ptrs = states_ptr + own.to(tl.int64) * states_stride + element
    left_ptrs = states_ptr + left.to(tl.int64) * states_stride + element
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    state = tl.load(state_ptrs, inside, other=0.0).to(tl.float32)
    tl.store(left_ptrs, state.to(dtype), inside & (leaves == 0))
    for n in range(count):
        at = first.to(tl.int64) + n
        gates = gates_ptr + at * GATES
        qkv, a = kept_ptr + at * CHANNELS, gates + VALUES
        state = _behind(state, qkv, gates, a, a_log, bias, head, i, j, l2_eps, KEYS, VALUES, K, V, BY_CHANNEL)
        state = rounded(state, begin + n, element, dtype).to(tl.float32)
        tl.store(left_ptrs, state.to(dtype), inside & (leaves == n + 1))
    tl.store(state_ptrs, state.to(dtype), inside)

    base = tl.load(base_ptr)
    for t in range(start, stop):
        token = start.to(tl.int64) + (t - start)
        qkv, b, a = qkv_ptr + token * qkv_stride, b_ptr + token * b_stride, a_ptr + token * a_stride
        gates = gates_ptr + tl.minimum(base + token, num_inputs - 1) * GATES
        tl.store(gates + head, tl.load(b + head).to(gates_ptr.dtype.element_ty))
        if BY_CHANNEL:
            own_a = tl.load(a + head * K + i, i < K, other=0.0)
            tl.store(gates + VALUES + head * K + i, own_a.to(gates_ptr.dtype.element_ty), i < K)
        else:
            tl.store(gates + VALUES + head, tl.load(a + head).to(gates_ptr.dtype.element_ty))
        state = _behind(state, qkv, b, a, a_log, bias, head, i, j, l2_eps, KEYS, VALUES, K, V, BY_CHANNEL)
        query = qkv + head // (VALUES // KEYS) * K + i
        q = l2_normed(tl.load(query, i < K, other=0.0).to(tl.float32), l2_eps, 0) * scale
        o = tl.sum(state * q[:, None], 0).to(y_ptr.dtype.element_ty).to(tl.float32)
        z = tl.load(z_ptr + token * z_stride + head * V + j, j < V, other=0.0)
        normed = gated(o, tl.sum(o * o, 0) / V, tl.load(norm_ptr + j, j < V, other=0.0), z, eps, BY_CHANNEL)
        tl.store(y_ptrs + token * (VALUES * V), normed.to(y_ptr.dtype.element_ty), j < V)
        state = rounded(state, position + (t - start), element, dtype).to(tl.float32)


def take_windows(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows, y: torch.Tensor
) -> None:
    """Write y [T, Hv V] of the tokens of decode rows; their states, and what is kept of them, are read and written."""
    assert rows.windows is not None
    _, kept, gates = rows.windows.inputs
    _windows_kernel[heads.num_values, num_programs(rows)](
        *inputs, *weights[:3], states, kept, gates, y, rows.query_start, rows.decode_limit, rows.windows.base, rows.own,
        *tables_of(rows), *(x.stride(0) for x in inputs), states.stride(0), weights.eps, delta_reference.L2_EPS,
        heads.key_dim**-0.5, len(kept), len(y),
        KEYS=heads.num_keys, VALUES=heads.num_values, K=heads.key_dim, V=heads.value_dim,
        K_2=triton.next_power_of_2(heads.key_dim), V_2=triton.next_power_of_2(heads.value_dim), BY_CHANNEL=heads.by_channel,
        FILLS=not rows.has_prefill, num_warps=8 if heads.key_dim * heads.value_dim > 4096 else 4,
    )  # fmt: skip
