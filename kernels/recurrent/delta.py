"""Gated DeltaNet: a launch for decode rows, and for prompts `delta_prefill`, or `channel_prefill` where channels decay apart.
Decode rows with windows: `delta_windows`. Reference: `delta_reference.gated_delta`.

A program of decode rows has a row's value head: it computes gates and normalized q and k, reads the head's state [K, V] once
and writes it once, block by block of its columns, and applies the norm and the gate to its output. Its first block is on its
way while the kernel before ends.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import channel_prefill, delta_prefill, delta_reference, delta_windows
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.gates import decay, gated, l2_normed
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

MANY_PROGRAMS = 1024


@triton.jit
def _decode_kernel(
    qkv_ptr,
    z_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    states_ptr,
    own_ptr,
    limit_ptr,
    positions_ptr,
    y_ptr,
    qkv_stride,
    z_stride,
    b_stride,
    a_stride,
    states_stride,
    eps,
    l2_eps,
    scale,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_2: tl.constexpr,
    V_2: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FILLS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, columns = tl.arange(0, K_2), tl.arange(0, V_2)
    own, limit = tl.load(own_ptr + row), tl.load(limit_ptr)  # both at once
    is_live = row < limit
    element = head * (K * V) + i[:, None] * V + tl.arange(0, BLOCK)[None, :]
    state_ptrs = states_ptr + own.to(tl.int64) * states_stride + element
    keys = (i < K)[:, None] & is_live
    state = tl.load(state_ptrs, keys & (tl.arange(0, BLOCK) < V)[None, :], other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    wait_for_previous(PDL)
    y = y_ptr + (row * VALUES + head) * V
    if row >= limit:
        if FILLS:
            tl.store(y + columns, tl.zeros([V_2], y_ptr.dtype.element_ty), columns < V)
        return
    key = qkv_ptr + row * qkv_stride + head // (VALUES // KEYS) * K + i
    q = l2_normed(tl.load(key, i < K, other=0.0).to(tl.float32), l2_eps, 0) * scale
    k = l2_normed(tl.load(key + KEYS * K, i < K, other=0.0).to(tl.float32), l2_eps, 0)
    beta = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
    if BY_CHANNEL:
        channel = head * K + i
        a = tl.load(a_ptr + row * a_stride + channel, i < K, other=0.0)
        kept = tl.exp(decay(a, a_log, tl.load(dt_bias_ptr + channel, i < K, other=0.0)))[:, None]
    else:
        kept = tl.exp(decay(tl.load(a_ptr + row * a_stride + head), a_log, tl.load(dt_bias_ptr + head)))
    position = tl.load(positions_ptr + row)
    values = qkv_ptr + row * qkv_stride + 2 * KEYS * K + head * V
    for first in tl.static_range(0, V_2, BLOCK):
        j = first + tl.arange(0, BLOCK)
        following = state
        if first + BLOCK < V_2:  # on its way while this block is computed
            inside = keys & (j + BLOCK < V)[None, :]
            following = tl.load(state_ptrs + (first + BLOCK), inside, other=0.0).to(tl.float32)
        v = tl.load(values + j, j < V, other=0.0).to(tl.float32)
        state *= kept
        delta = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * delta[None, :]
        stored = rounded(state, position, element + first, states_ptr.dtype.element_ty)
        tl.store(state_ptrs + first, stored, keys & (j < V)[None, :])
        o = tl.sum(state * q[:, None], 0).to(y_ptr.dtype.element_ty)
        if BLOCK < V_2:
            tl.store(y + j, o, j < V)
        state = following
    if BLOCK < V_2:
        tl.debug_barrier()
        o = tl.load(y + columns, columns < V, other=0.0)
    o = o.to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + head * V + columns, columns < V, other=0.0)
    variance = tl.sum(o * o, 0) / V
    normed = gated(o, variance, tl.load(norm_ptr + columns, columns < V, other=0.0), z, eps, BY_CHANNEL)
    tl.store(y + columns, normed.to(y_ptr.dtype.element_ty), columns < V)


class Config(NamedTuple):
    block: int  # columns of a state that a program has in registers
    num_warps: int


def choose(heads: DeltaHeads, rows: int) -> Config:
    """How programs of decode rows go through their states.

    A few rows are waiting for memory: all of a state at once. Where many programs share an SM, small ones keep more bytes on
    their way.
    """
    columns = triton.next_power_of_2(heads.value_dim)
    if heads.key_dim * heads.value_dim <= 4096:
        return Config(columns, 4)
    return Config(columns, 8) if rows * heads.num_values < MANY_PROGRAMS else Config(min(columns, 32), 4)


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    heads: DeltaHeads,
    states: torch.Tensor,
    rows: Rows,
    *,
    pdl: int = PLAIN,
    config: Config | None = None,
) -> torch.Tensor:
    """y [T, Hv V]; states [N, Hv, K, V] are read and written; states may lie apart. Tokens of no row have zeros.

    `config` is for tuning.
    """
    num_tokens = len(inputs.qkv)
    y = torch.empty((num_tokens, heads.value_size), dtype=inputs.qkv.dtype, device=states.device)
    grid = heads.num_values, rows.num_decode_rows or len(rows.own)
    block, num_warps = config or choose(heads, grid[1])
    if rows.windows is not None:
        delta_windows.take_windows(inputs, weights, heads, states, rows, y, (block, num_warps), pdl)
    elif rows.has_decode:
        strides = (*(x.stride(0) for x in inputs), states.stride(0))
        _decode_kernel[grid](
            *inputs,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            states,
            rows.own,
            rows.decode_limit,
            rows.positions,
            y,
            *strides,
            weights.eps,
            delta_reference.L2_EPS,
            heads.key_dim**-0.5,
            KEYS=heads.num_keys,
            VALUES=heads.num_values,
            K=heads.key_dim,
            V=heads.value_dim,
            K_2=triton.next_power_of_2(heads.key_dim),
            V_2=triton.next_power_of_2(heads.value_dim),
            BLOCK=block,
            BY_CHANNEL=heads.by_channel,
            FILLS=not rows.has_prefill,
            PDL=pdl,
            num_warps=num_warps,
            **launch_options(pdl),
        )
    if rows.has_prefill:
        prefill = channel_prefill.prefill if heads.by_channel else delta_prefill.prefill
        prefill(inputs, weights, heads, states, rows, y)
        delta_prefill.norm_in_place(y, inputs.z, weights, heads, rows)
    return y
