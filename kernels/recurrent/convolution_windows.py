"""Causal convolution of decode rows with windows: the kept inputs that were accepted, then those of the step. One launch.

A program has a row and some channels. It reads the inputs before a token wherever they are (in the tail, among kept ones, in
the step), keeps the step's own, and moves the tail by what was accepted. Reference: convolution_reference, formulas too.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.windows import kept_row, num_programs, tables_of
from quire.kernels.triton_support.dependent_launch import launch_options, wait_for_previous

CHANNELS = 128  # of a program


@triton.jit
def _seen(
    place, x_ptr, before_ptr, kept_ptr, tail, start, first, count, x_stride, c, C, inside, W: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The inputs at a place, counted from the row's first token: its own, or before it kept ones, or before these the tail."""
    is_new, is_kept = place >= 0, (place < 0) & (place >= -count)
    at = (start + place).to(tl.int64) * x_stride + c
    x = tl.load(x_ptr + at, inside & is_new, other=0.0)
    if GATED:
        gate = tl.load(before_ptr + at, inside & is_new, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)
    kept = tl.load(kept_ptr + (first + count + place).to(tl.int64) * C + c, inside & is_kept, other=0.0)
    old = tl.load(tail + (W - 1 + count + place) * C, inside & (place < -count), other=0.0)
    return tl.where(is_new, x, tl.where(is_kept, kept.to(x.dtype), old.to(x.dtype)))


@triton.jit(do_not_specialize=["C", "num_inputs"])
def _windows_kernel(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, kept_ptr, kept_y_ptr, query_start_ptr, limit_ptr, base_ptr, own_ptr, slots_ptr,
    num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, before_ptr, after_ptr, y_ptr, x_stride,
    tails_stride, num_inputs, C,
    W: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KEEPS_Y: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, limit = tl.program_id(0), tl.load(limit_ptr)
    at_row = tl.where(row < limit, row, 0)  # the tables have what a program without a row does not need
    start, stop = tl.load(query_start_ptr + at_row), tl.load(query_start_ptr + at_row + 1)
    own, first, count, _, _, leaves, state = kept_row(
        at_row, start, stop, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr,
        num_inputs,
    )  # fmt: skip
    wait_for_previous(PDL)
    if row >= limit:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    tail = tails_ptr + own.to(tl.int64) * tails_stride + c
    base = tl.load(base_ptr)
    for t in range(start, stop):
        token = start.to(tl.int64) + (t - start)
        sums = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(W):
            place = t - start + (i - W + 1)
            x = _seen(place, x_ptr, before_ptr, kept_ptr, tail, start, first, count, x_stride, c, C, inside, W, GATED)
            sums += x.to(tl.float32) * tl.load(weight_ptr + i * C + c, inside, other=0.0).to(tl.float32)
            if i == W - 1:
                kept = tl.minimum(base + token, num_inputs - 1) * C + c
                tl.store(kept_ptr + kept, x.to(kept_ptr.dtype.element_ty), inside)
        if BIAS:
            sums += tl.load(bias_ptr + c, inside, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(after_ptr + token * x_stride + c, inside, other=0.0)
            y = (sums.to(y_ptr.dtype.element_ty).to(tl.float32) * gate.to(tl.float32)).to(y_ptr.dtype.element_ty)
        else:
            y = (sums / (1.0 + tl.exp(-sums))).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + token * C + c, y, inside)
        if KEEPS_Y:
            tl.store(kept_y_ptr + tl.minimum(base + token, num_inputs - 1) * C + c, y, inside)
    left = tails_ptr + state.to(tl.int64) * tails_stride + c
    for i in tl.static_range(W - 1):
        place = tl.maximum(leaves, 0) - count + (i - W + 1)  # nothing before the tail is read where the state is not left
        x = _seen(place, x_ptr, before_ptr, kept_ptr, tail, start, first, count, x_stride, c, C, inside, W, GATED)
        tl.store(left + i * C, x.to(tails_ptr.dtype.element_ty), inside & (leaves >= 0))
    for i in tl.static_range(W - 1):  # a place of the tail is read before it is written
        x = _seen(
            start * 0 + (i - W + 1), x_ptr, before_ptr, kept_ptr, tail, start, first, count, x_stride, c, C, inside, W, GATED
        )
        tl.store(tail + i * C, x.to(tails_ptr.dtype.element_ty), inside)


def convolve_windows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    y: torch.Tensor,
    gates: Gates | None = None,
    *,
    pdl: int,
) -> None:
    """Write y [T, C] of the tokens of decode rows; their tails, and what is kept of them, are read and written."""
    assert rows.windows is not None
    (window, channels), kept = weight.shape, rows.windows.inputs
    before, after = (None, None) if gates is None else gates
    keeps_y = len(kept) > 1
    _windows_kernel[num_programs(rows), triton.cdiv(channels, CHANNELS)](
        x, weight, bias, tails, kept[0], kept[1] if keeps_y else kept[0], rows.query_start, rows.decode_limit,
        rows.windows.base, rows.own, *tables_of(rows), before, after, y, x.stride(0), tails.stride(0), len(kept[0]), channels,
        W=window, BIAS=bias is not None, GATED=gates is not None, KEEPS_Y=keeps_y, BLOCK=CHANNELS,
        PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
