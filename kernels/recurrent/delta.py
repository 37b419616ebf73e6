"""Gated DeltaNet: a launch for decode rows, and for prompts `delta_prefill`, or `channel_prefill` where channels decay apart.
Decode rows with windows: `delta_windows`. Reference: `delta_reference.gated_delta`.

A program of decode rows has a row's value head: it computes gates and normalized q and k, reads the head's state [K, V] once
and writes it once, and applies the norm and the gate to its output.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import channel_prefill, delta_prefill, delta_reference, delta_windows
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.gates import decay, gated, l2_normed
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows


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
    BY_CHANNEL: tl.constexpr,
    FILLS: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tl.arange(0, K_2), tl.arange(0, V_2)
    y = y_ptr + (row * VALUES + head) * V + j
    if row >= tl.load(limit_ptr):
        if FILLS:
            tl.store(y, tl.zeros([V_2], y_ptr.dtype.element_ty), j < V)
        return
    place = tl.load(own_ptr + row).to(tl.int64) * states_stride + head * (K * V)
    state_ptrs = states_ptr + place + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(state_ptrs, inside, other=0.0).to(tl.float32)
    key = qkv_ptr + row * qkv_stride + head // (VALUES // KEYS) * K + i
    q = l2_normed(tl.load(key, i < K, other=0.0).to(tl.float32), l2_eps, 0) * scale
    k = l2_normed(tl.load(key + KEYS * K, i < K, other=0.0).to(tl.float32), l2_eps, 0)
    v = tl.load(qkv_ptr + row * qkv_stride + 2 * KEYS * K + head * V + j, j < V, other=0.0).to(tl.float32)
    beta, a_log = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32)), tl.load(a_log_ptr + head)
    if BY_CHANNEL:
        channel = head * K + i
        a = tl.load(a_ptr + row * a_stride + channel, i < K, other=0.0)
        state *= tl.exp(decay(a, a_log, tl.load(dt_bias_ptr + channel, i < K, other=0.0)))[:, None]
    else:
        state *= tl.exp(decay(tl.load(a_ptr + row * a_stride + head), a_log, tl.load(dt_bias_ptr + head)))
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * delta[None, :]
    element = head * (K * V) + i[:, None] * V + j[None, :]
    stored = rounded(state, tl.load(positions_ptr + row), element, states_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, inside)
    o = tl.sum(state * q[:, None], 0).to(y_ptr.dtype.element_ty).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + head * V + j, j < V, other=0.0)
    variance = tl.sum(o * o, 0) / V
    normed = gated(o, variance, tl.load(norm_ptr + j, j < V, other=0.0), z, eps, BY_CHANNEL)
    tl.store(y, normed.to(y_ptr.dtype.element_ty), j < V)


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """y [T, Hv V]; states [N, Hv, K, V] are read and written; states may lie apart. Tokens of no row have zeros."""
    num_tokens = len(inputs.qkv)
    y = torch.empty((num_tokens, heads.value_size), dtype=inputs.qkv.dtype, device=states.device)
    if rows.windows is not None:
        delta_windows.take_windows(inputs, weights, heads, states, rows, y)
    elif rows.has_decode:
        strides = (*(x.stride(0) for x in inputs), states.stride(0))
        grid = heads.num_values, rows.num_decode_rows or len(rows.own)
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
            BY_CHANNEL=heads.by_channel,
            FILLS=not rows.has_prefill,
            num_warps=8 if heads.key_dim * heads.value_dim > 4096 else 4,
        )
    if rows.has_prefill:
        prefill = channel_prefill.prefill if heads.by_channel else delta_prefill.prefill
        prefill(inputs, weights, heads, states, rows, y)
        delta_prefill.norm_in_place(y, inputs.z, weights, heads, rows)
    return y
