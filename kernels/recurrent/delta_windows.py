"""Gated DeltaNet of decode rows with windows: the kept tokens that were accepted, then those of the step. One launch.

A program has a row's value head. Block by block of its columns, which do not depend on each other, it reads the head's state
[K, V] once, applies what was accepted, writes it once, and goes on with the step's own tokens and forgets their states: b and a
are kept of them, and the convolution has kept q|k|v. The norm comes last, over all columns. As without windows, the first block
is on its way while the kernel before ends, and a state in fewer bits is rounded after each token. Reference:
`delta_reference.gated_delta`.
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
from quire.kernels.triton_support.dependent_launch import launch_options, wait_for_previous


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


@triton.jit
def _normed(o, z, norm_ptr, j, eps, V: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """A token's output behind the norm and its gate. o float32 [V_2]."""
    return gated(o, tl.sum(o * o, 0) / V, tl.load(norm_ptr + j, j < V, other=0.0), z, eps, BY_CHANNEL)


@triton.jit(do_not_specialize=["T", "num_inputs"])
def _windows_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, states_ptr, kept_ptr, gates_ptr, y_ptr, query_start_ptr,
    limit_ptr, base_ptr, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, qkv_stride,
    z_stride, b_stride, a_stride, states_stride, eps, l2_eps, scale, num_inputs, T,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_2: tl.constexpr, V_2: tl.constexpr,
    BLOCK: tl.constexpr, BY_CHANNEL: tl.constexpr, FILLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    i, columns = tl.arange(0, K_2), tl.arange(0, V_2)
    limit = tl.load(limit_ptr)
    is_live = row < limit
    at_row = tl.where(is_live, row, 0)  # the tables have what a program without a row does not need
    start, stop = tl.load(query_start_ptr + at_row), tl.load(query_start_ptr + at_row + 1)
    own, first, count, begin, position, leaves, left = kept_row(
        at_row, start, stop, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr,
        num_inputs,
    )  # fmt: skip
    element = head * (K * V) + i[:, None] * V + tl.arange(0, BLOCK)[None, :]
    state_ptrs = states_ptr + own.to(tl.int64) * states_stride + element
    left_ptrs = states_ptr + left.to(tl.int64) * states_stride + element
    keys = (i < K)[:, None] & is_live
    state = tl.load(state_ptrs, keys & (tl.arange(0, BLOCK) < V)[None, :], other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    if BY_CHANNEL:
        bias = tl.load(dt_bias_ptr + head * K + i, i < K, other=0.0)
    else:
        bias = tl.load(dt_bias_ptr + head)
    wait_for_previous(PDL)
    y_ptrs = y_ptr + head * V
    if row >= limit:
        if FILLS:  # tokens of no row: there are no more of them than rows without tokens
            token = (tl.load(query_start_ptr + limit) + row - limit).to(tl.int64)
            zeros = tl.zeros([V_2], y_ptr.dtype.element_ty)
            tl.store(y_ptrs + token * (VALUES * V) + columns, zeros, (columns < V) & (token < T))
        return
    CHANNELS: tl.constexpr = 2 * KEYS * K + VALUES * V
    GATES: tl.constexpr = VALUES + (VALUES * K if BY_CHANNEL else VALUES)
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    base = tl.load(base_ptr)
    for block in tl.static_range(0, V_2, BLOCK):
        j = block + tl.arange(0, BLOCK)
        inside = keys & (j < V)[None, :]
        following = state
        if block + BLOCK < V_2:  # on its way while this block is computed
            further = keys & (j + BLOCK < V)[None, :]
            following = tl.load(state_ptrs + (block + BLOCK), further, other=0.0).to(tl.float32)
        tl.store(left_ptrs + block, state.to(dtype), inside & (leaves == 0))
        for n in range(count):
            at = first.to(tl.int64) + n
            gates = gates_ptr + at * GATES
            qkv, a = kept_ptr + at * CHANNELS, gates + VALUES
            state = _behind(state, qkv, gates, a, a_log, bias, head, i, j, l2_eps, KEYS, VALUES, K, V, BY_CHANNEL)
            state = rounded(state, begin + n, element + block, dtype).to(tl.float32)
            tl.store(left_ptrs + block, state.to(dtype), inside & (leaves == n + 1))
        tl.store(state_ptrs + block, state.to(dtype), inside)

        for t in range(start, stop):
            token = start.to(tl.int64) + (t - start)
            qkv, b, a = qkv_ptr + token * qkv_stride, b_ptr + token * b_stride, a_ptr + token * a_stride
            if block == 0:
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
            o = tl.sum(state * q[:, None], 0).to(y_ptr.dtype.element_ty)
            if BLOCK == V_2:
                z = tl.load(z_ptr + token * z_stride + head * V + j, j < V, other=0.0)
                o = _normed(o.to(tl.float32), z, norm_ptr, j, eps, V, BY_CHANNEL).to(y_ptr.dtype.element_ty)
            tl.store(y_ptrs + token * (VALUES * V) + j, o, j < V)
            state = rounded(state, position + (t - start), element + block, dtype).to(tl.float32)
        state = following
    if BLOCK < V_2:
        tl.debug_barrier()
        for t in range(start, stop):
            token = start.to(tl.int64) + (t - start)
            y = y_ptrs + token * (VALUES * V) + columns
            z = tl.load(z_ptr + token * z_stride + head * V + columns, columns < V, other=0.0)
            o = tl.load(y, columns < V, other=0.0).to(tl.float32)
            normed = _normed(o, z, norm_ptr, columns, eps, V, BY_CHANNEL)
            tl.store(y, normed.to(y_ptr.dtype.element_ty), columns < V)


def take_windows(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    heads: DeltaHeads,
    states: torch.Tensor,
    rows: Rows,
    y: torch.Tensor,
    config: tuple[int, int],
    pdl: int,
) -> None:
    """Write y [T, Hv V] of the tokens of decode rows; their states, and what is kept of them, are read and written. config: the
    columns of a block, and warps."""
    assert rows.windows is not None
    _, kept, gates = rows.windows.inputs
    block, num_warps = config
    _windows_kernel[heads.num_values, num_programs(rows)](
        *inputs, *weights[:3], states, kept, gates, y, rows.query_start, rows.decode_limit, rows.windows.base, rows.own,
        *tables_of(rows), *(x.stride(0) for x in inputs), states.stride(0), weights.eps, delta_reference.L2_EPS,
        heads.key_dim**-0.5, len(kept), len(y),
        KEYS=heads.num_keys, VALUES=heads.num_values, K=heads.key_dim, V=heads.value_dim,
        K_2=triton.next_power_of_2(heads.key_dim), V_2=triton.next_power_of_2(heads.value_dim), BLOCK=block,
        BY_CHANNEL=heads.by_channel, FILLS=not rows.has_prefill, PDL=pdl, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
