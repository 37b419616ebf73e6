"""Mamba 2's recurrence of decode rows with windows: the kept tokens that were accepted, then those of the step. One launch.

A program has a row's head and some of its channels. It reads their part of the state [N, P] once, applies what was accepted,
writes it once, and goes on with the step's own tokens and forgets their states: dt is kept of them, and the convolution has
kept x|B|C. As without windows, the state is on its way while the kernel before ends, and one in fewer bits is rounded after
each token. Reference: `mamba_reference.mamba`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.gates import time_steps
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.windows import kept_row, num_programs, tables_of
from quire.kernels.triton_support.dependent_launch import launch_options, wait_for_previous


@triton.jit
def _behind(
    state, xbc, dt, bias, a_log, dt_min, dt_max, head, i, j, GROUPS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """(the head's state behind a token, its x). xbc: pointer to the token's x|B|C."""
    x = tl.load(xbc + head * P + j, j < P, other=0.0).to(tl.float32)
    b = tl.load(xbc + HEADS * P + head // (HEADS // GROUPS) * N + i, i < N, other=0.0).to(tl.float32)
    delta, decay = time_steps(dt, bias, a_log, dt_min, dt_max)
    return state * tl.exp(decay) + b[:, None] * (x * delta)[None, :], x


@triton.jit(do_not_specialize=["num_inputs"])
def _windows_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, states_ptr, kept_ptr, kept_dt_ptr, y_ptr, query_start_ptr, limit_ptr,
    base_ptr, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, xbc_stride, dt_stride,
    states_stride, dt_min, dt_max, num_inputs,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, N_2: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    limit = tl.load(limit_ptr)
    is_live = row < limit
    at_row = tl.where(is_live, row, 0)  # the tables have what a program without a row does not need
    start, stop = tl.load(query_start_ptr + at_row), tl.load(query_start_ptr + at_row + 1)
    own, first, count, begin, position, leaves, left = kept_row(
        at_row, start, stop, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr,
        num_inputs,
    )  # fmt: skip
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    i, j = tl.arange(0, N_2), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bias, a_log, d = tl.load(dt_bias_ptr + head), tl.load(a_log_ptr + head), tl.load(d_ptr + head)
    element = head * (N * P) + i[:, None] * P + j[None, :]
    inside = (i < N)[:, None] & (j < P)[None, :] & is_live
    state_ptrs = states_ptr + own.to(tl.int64) * states_stride + element
    left_ptrs = states_ptr + left.to(tl.int64) * states_stride + element
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    state = tl.load(state_ptrs, inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if row >= limit:
        return
    tl.store(left_ptrs, state.to(dtype), inside & (leaves == 0))
    for n in range(count):
        at = first.to(tl.int64) + n
        dt = tl.load(kept_dt_ptr + at * HEADS + head)
        state, _ = _behind(
            state, kept_ptr + at * CHANNELS, dt, bias, a_log, dt_min, dt_max, head, i, j, GROUPS, HEADS, N, P
        )  # fmt: skip
        state = rounded(state, begin + n, element, dtype).to(tl.float32)
        tl.store(left_ptrs, state.to(dtype), inside & (leaves == n + 1))
    tl.store(state_ptrs, state.to(dtype), inside)

    base = tl.load(base_ptr)
    for t in range(start, stop):
        token = start.to(tl.int64) + (t - start)
        xbc, dt = xbc_ptr + token * xbc_stride, tl.load(dt_ptr + token * dt_stride + head)
        kept = tl.minimum(base + token, num_inputs - 1)
        tl.store(kept_dt_ptr + kept * HEADS + head, dt.to(kept_dt_ptr.dtype.element_ty), tl.program_id(0) == 0)
        state, x = _behind(state, xbc, dt, bias, a_log, dt_min, dt_max, head, i, j, GROUPS, HEADS, N, P)
        group = xbc + HEADS * P + GROUPS * N + head // (HEADS // GROUPS) * N + i
        c = tl.load(group, i < N, other=0.0).to(tl.float32)
        y = tl.sum(state * c[:, None], 0) + d * x
        tl.store(y_ptr + (token * HEADS + head) * P + j, y.to(y_ptr.dtype.element_ty), j < P)
        state = rounded(state, position + (t - start), element, dtype).to(tl.float32)


def take_windows(
    inputs: MambaInputs,
    weights: MambaWeights,
    heads: MambaHeads,
    states: torch.Tensor,
    rows: Rows,
    y: torch.Tensor,
    config: tuple[int, int],
    pdl: int,
) -> None:
    """Write y [T, H P] of the tokens of decode rows, not yet normed; their states, and what is kept of them, are read and
    written. config: the channels of a program, and its warps."""
    assert rows.windows is not None
    _, kept, kept_dt = rows.windows.inputs
    block, num_warps = config
    _windows_kernel[triton.cdiv(heads.head_dim, block), heads.num_heads, num_programs(rows)](
        inputs.xbc, inputs.dt, weights.a_log, weights.dt_bias, weights.d, states, kept, kept_dt, y, rows.query_start,
        rows.decode_limit, rows.windows.base, rows.own, *tables_of(rows), inputs.xbc.stride(0), inputs.dt.stride(0),
        states.stride(0), weights.dt_min, weights.dt_max, len(kept),
        GROUPS=heads.num_groups, HEADS=heads.num_heads, N=heads.state_size, P=heads.head_dim,
        N_2=triton.next_power_of_2(heads.state_size), BLOCK=block, PDL=pdl, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
