"""Mamba 2's recurrence: a launch for decode rows, one for prompts, and one for the norm. Decode rows with windows:
`mamba_windows`. Reference: `mamba_reference.mamba`.

A program of decode rows has a row's head and some of its channels, and reads and writes their part of the state [N, P] once.
A program of prompts has the same and goes through the row by chunks of 64 tokens with the state. The norm is of many heads'
channels, so it is a launch of its own. Products of 16-bit models are tf32, with float32 sums.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import mamba_windows
from quire.kernels.recurrent.chunks import CHUNK
from quire.kernels.recurrent.gates import time_steps
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

BLOCK_CHANNELS = 32  # of a program of prompts
DECODE_CHANNELS, DECODE_WARPS = 64, 4  # of a program of decode rows


@triton.jit
def _decode_kernel(
    xbc_ptr,
    dt_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    states_ptr,
    own_ptr,
    limit_ptr,
    positions_ptr,
    y_ptr,
    xbc_stride,
    dt_stride,
    states_stride,
    dt_min,
    dt_max,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_2: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, N_2), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, limit = tl.load(own_ptr + row), tl.load(limit_ptr)  # both at once
    element = head * (N * P) + i[:, None] * P + j[None, :]
    state_ptrs = states_ptr + own.to(tl.int64) * states_stride + element
    inside = (i < N)[:, None] & (j < P)[None, :] & (row < limit)
    state = tl.load(state_ptrs, inside, other=0.0).to(tl.float32)
    a_log, bias, d = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    wait_for_previous(PDL)
    if row >= limit:
        return
    xbc = xbc_ptr + row * xbc_stride
    x = tl.load(xbc + head * P + j, j < P, other=0.0).to(tl.float32)
    group = xbc + HEADS * P + head // (HEADS // GROUPS) * N + i
    b = tl.load(group, i < N, other=0.0).to(tl.float32)
    c = tl.load(group + GROUPS * N, i < N, other=0.0).to(tl.float32)
    delta, decay = time_steps(tl.load(dt_ptr + row * dt_stride + head), bias, a_log, dt_min, dt_max)
    state = state * tl.exp(decay) + b[:, None] * (x * delta)[None, :]
    stored = rounded(state, tl.load(positions_ptr + row), element, states_ptr.dtype.element_ty)
    tl.store(state_ptrs, stored, inside)
    y = tl.sum(state * c[:, None], 0) + d * x
    tl.store(y_ptr + (row * HEADS + head) * P + j, y.to(y_ptr.dtype.element_ty), j < P)


@triton.jit
def _prefill_kernel(
    xbc_ptr,
    dt_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    states_ptr,
    y_ptr,
    query_start_ptr,
    own_ptr,
    first_ptr,
    last_ptr,
    limit_ptr,
    positions_ptr,
    xbc_stride,
    dt_stride,
    states_stride,
    dt_min,
    dt_max,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_2: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (row < tl.load(limit_ptr)) | (start == stop):
        return
    own, first, last = tl.load(own_ptr + row), tl.load(first_ptr + row), tl.load(last_ptr + row)
    i, n = tl.arange(0, N_2), tl.arange(0, CHUNK)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    element = head * (N * P) + i[:, None] * P + j[None, :]
    state_ptrs = states_ptr + element
    inside = (i < N)[:, None] & (j < P)[None, :]
    state = tl.load(state_ptrs + first.to(tl.int64) * states_stride, inside & (first != 0), other=0.0).to(tl.float32)
    bias, a_log, d = tl.load(dt_bias_ptr + head), tl.load(a_log_ptr + head), tl.load(d_ptr + head)
    group = xbc_ptr + HEADS * P + head // (HEADS // GROUPS) * N
    seen = n[:, None] >= n[None, :]
    for begin in range(start, stop, CHUNK):
        t = (begin + n).to(tl.int64)
        valid = t < stop
        delta, decay = time_steps(tl.load(dt_ptr + t * dt_stride + head, valid, other=0.0), bias, a_log, dt_min, dt_max)
        decay = tl.where(valid, decay, 0.0)
        sums, end = tl.cumsum(decay, 0), tl.sum(decay, 0)
        of_group = valid[:, None] & (i < N)[None, :]
        at = t[:, None] * xbc_stride + i[None, :]
        b = tl.load(group + at, of_group, other=0.0).to(tl.float32)
        c = tl.load(group + GROUPS * N + at, of_group, other=0.0).to(tl.float32)
        of_head = valid[:, None] & (j < P)[None, :]
        x = tl.load(xbc_ptr + t[:, None] * xbc_stride + head * P + j[None, :], of_head, other=0.0).to(tl.float32)
        scaled = x * delta[:, None]
        products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        products *= tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
        y = tl.dot(c * tl.exp(sums)[:, None], state, input_precision=PRECISION)
        y += tl.dot(products, scaled, input_precision=PRECISION) + d * x
        tl.store(y_ptr + (t[:, None] * HEADS + head) * P + j[None, :], y.to(y_ptr.dtype.element_ty), of_head)
        b *= tl.exp(tl.minimum(end - sums, 0.0))[:, None]
        state = state * tl.exp(end) + tl.dot(tl.trans(b), scaled, input_precision=PRECISION)
        position = tl.load(positions_ptr + tl.minimum(begin + CHUNK, stop) - 1)
        state = rounded(state, position, element, states_ptr.dtype.element_ty).to(tl.float32)
    state = state.to(states_ptr.dtype.element_ty)
    tl.store(state_ptrs + own.to(tl.int64) * states_stride, state, inside)
    tl.store(state_ptrs + last.to(tl.int64) * states_stride, state, inside & (last != 0))


@triton.jit(do_not_specialize=["R"])
def _norm_kernel(
    y_ptr,
    z_ptr,
    norm_ptr,
    query_start_ptr,
    z_stride,
    eps,
    R,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    FIRST: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside, at = j < GROUP, tl.program_id(1) * GROUP + j
    there = inside & (t < tl.load(query_start_ptr + R))
    y = tl.load(y_ptr + t * SIZE + at, there, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * z_stride + at, there, other=0.0).to(tl.float32)
    gate = z * tl.sigmoid(z)
    if not (NORMS and FIRST):
        y *= gate
    if NORMS:
        y *= tl.rsqrt(tl.sum(y * y, 0) / GROUP + eps) * tl.load(norm_ptr + at, inside, other=0.0).to(tl.float32)
        if FIRST:
            y *= gate
    tl.store(y_ptr + t * SIZE + at, y.to(y_ptr.dtype.element_ty), inside)


def mamba(
    inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [T, H P]; states [N, H, N, P] are read and written; states may lie apart. Tokens of no row have zeros."""
    xbc, z, dt = inputs
    new = torch.zeros if z is None else torch.empty  # else the norm's kernel writes the zeros
    y = new((len(xbc), heads.size), dtype=xbc.dtype, device=xbc.device)
    tensors = xbc, dt, weights.a_log, weights.dt_bias, weights.d, states
    numbers = xbc.stride(0), dt.stride(0), states.stride(0), weights.dt_min, weights.dt_max
    sizes = {"GROUPS": heads.num_groups, "HEADS": heads.num_heads, "N": heads.state_size, "P": heads.head_dim}
    n_2, p_2 = (triton.next_power_of_2(size) for size in (heads.state_size, heads.head_dim))
    block = min(p_2, DECODE_CHANNELS)
    if rows.windows is not None:
        mamba_windows.take_windows(inputs, weights, heads, states, rows, y, (block, DECODE_WARPS), pdl)
    elif rows.has_decode:
        grid = triton.cdiv(heads.head_dim, block), heads.num_heads, rows.num_decode_rows or len(rows.own)
        how = {"N_2": n_2, "BLOCK": block, "PDL": pdl, "num_warps": DECODE_WARPS, **launch_options(pdl)}
        _decode_kernel[grid](*tensors, rows.own, rows.decode_limit, rows.positions, y, *numbers, **sizes, **how)
    if rows.has_prefill:
        block, precision = min(BLOCK_CHANNELS, max(16, p_2)), "ieee" if xbc.dtype == torch.float32 else "tf32"
        states_of_rows = rows.query_start, rows.own, rows.first, rows.last, rows.decode_limit, rows.positions
        tiles = triton.cdiv(heads.head_dim, block), heads.num_heads, len(rows.own)
        _prefill_kernel[tiles](
            *tensors, y, *states_of_rows, *numbers, **sizes, N_2=max(16, n_2), BLOCK=block, PRECISION=precision
        )
    if z is None:
        return y
    _norm_kernel[len(y), heads.size // weights.norm_size](
        y,
        z,
        xbc if weights.norm is None else weights.norm,
        rows.query_start,
        z.stride(0),
        weights.eps,
        len(rows.own),
        SIZE=heads.size,
        GROUP=weights.norm_size,
        BLOCK=triton.next_power_of_2(weights.norm_size),
        NORMS=weights.norm is not None,
        FIRST=weights.norms_first,
    )
    return y
