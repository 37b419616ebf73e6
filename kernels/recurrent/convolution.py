"""Causal convolution over the last W inputs of each channel, with silu or gates; the states keep the W - 1 inputs before the
next token.

Decode rows take one launch, a program for a row and some channels; those with windows take `convolution_windows`. Prompts take
two: one computes, a program for 64 tokens and some channels; the other keeps the tails, afterwards, since the first chunk of a
row may still have to read the tail that is replaced. Rows and chunks come from the device's metadata. Reference:
`convolution_reference.causal_convolution`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import convolution_windows
from quire.kernels.recurrent.chunks import CHUNK, find_chunk, max_chunks, rows_2
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.rows import Rows
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

CHANNELS = 128  # of a program that keeps tails
DECODE_CHANNELS, DECODE_WARPS = 256, 2  # of a program of decode rows
CHUNK_CHANNELS = 64  # of a program of 64 tokens


@triton.jit
def _times(x, gate):
    """x · gate in x's dtype."""
    return (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)


@triton.jit
def _finished(sums, after_ptr, at, inside, dtype: tl.constexpr, GATED: tl.constexpr):
    """The output of these sums: silu of them, or times the gates."""
    if GATED:
        y = _times(sums.to(dtype), tl.load(after_ptr + at, inside, other=0.0))
    else:
        y = (sums / (1.0 + tl.exp(-sums))).to(dtype)
    return y


@triton.jit(do_not_specialize=["C"])
def _decode_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    own_ptr,
    limit_ptr,
    before_ptr,
    after_ptr,
    y_ptr,
    x_stride,
    tails_stride,
    C,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own, limit = tl.load(own_ptr + row), tl.load(limit_ptr)  # both at once
    inside = (c < C) & (row < limit)
    tail, at = tails_ptr + own.to(tl.int64) * tails_stride + c, row * x_stride + c
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(W - 1):
        old = tl.load(tail + i * C, inside, other=0.0)
        sums += old.to(tl.float32) * tl.load(weight_ptr + i * C + c, inside, other=0.0).to(tl.float32)
    last = tl.load(weight_ptr + (W - 1) * C + c, inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if row >= limit:
        return
    x = tl.load(x_ptr + at, inside, other=0.0)
    if GATED:
        x = _times(x, tl.load(before_ptr + at, inside, other=0.0))
    sums += x.to(tl.float32) * last
    for i in tl.static_range(1, W - 1):
        tl.store(tail + (i - 1) * C, tl.load(tail + i * C, inside, other=0.0), inside)
    tl.store(tail + (W - 2) * C, x.to(tails_ptr.dtype.element_ty), inside)
    if BIAS:
        sums += tl.load(bias_ptr + c, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + c, _finished(sums, after_ptr, at, inside, y_ptr.dtype.element_ty, GATED), inside)


@triton.jit
def _input(
    x_ptr,
    before_ptr,
    tails_ptr,
    start,
    position,
    first,
    x_stride,
    tails_stride,
    c,
    C,
    inside,
    W: tl.constexpr,
    GATED: tl.constexpr,
):
    """Inputs at these positions of the step: before `start` the tail of state `first`, or zeros if that is 0."""
    is_new = position >= start
    at = position.to(tl.int64) * x_stride + c
    x = tl.load(x_ptr + at, inside & is_new, other=0.0)
    if GATED:
        x = _times(x, tl.load(before_ptr + at, inside & is_new, other=0.0))
    old = tails_ptr + first.to(tl.int64) * tails_stride + (W - 1 + position - start) * C + c
    tail = tl.load(old, inside & (position < start) & (first != 0), other=0.0)
    return tl.where(is_new, x, tail.to(x.dtype))


@triton.jit(do_not_specialize=["C", "R"])
def _prefill_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    query_start_ptr,
    first_ptr,
    limit_ptr,
    before_ptr,
    after_ptr,
    y_ptr,
    x_stride,
    tails_stride,
    C,
    R,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_2: tl.constexpr,
):
    row, number = find_chunk(query_start_ptr, limit_ptr, tl.program_id(0), R, ROWS_2)
    if row >= R:
        return
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    first = tl.load(first_ptr + row)
    t = (start + number * CHUNK + tl.arange(0, CHUNK))[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (t < stop) & (c < C)
    sums = tl.zeros([CHUNK, BLOCK], tl.float32)
    for i in tl.static_range(W):
        position = t + (i - W + 1)
        x = _input(x_ptr, before_ptr, tails_ptr, start, position, first, x_stride, tails_stride, c, C, inside, W, GATED)
        sums += x.to(tl.float32) * tl.load(weight_ptr + i * C + c, c < C, other=0.0).to(tl.float32)
    if BIAS:
        sums += tl.load(bias_ptr + c, c < C, other=0.0).to(tl.float32)
    y = _finished(sums, after_ptr, t.to(tl.int64) * x_stride + c, inside, y_ptr.dtype.element_ty, GATED)
    tl.store(y_ptr + t.to(tl.int64) * C + c, y, inside)


@triton.jit(do_not_specialize=["C"])
def _tails_kernel(
    x_ptr,
    before_ptr,
    tails_ptr,
    query_start_ptr,
    own_ptr,
    first_ptr,
    last_ptr,
    limit_ptr,
    x_stride,
    tails_stride,
    C,
    W: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (row < tl.load(limit_ptr)) | (start == stop):
        return
    own, first, last = tl.load(own_ptr + row), tl.load(first_ptr + row), tl.load(last_ptr + row)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    for i in tl.static_range(W - 1):  # where the tail is its own source, a place is read before it is written
        position = stop + (i - W + 1)
        x = _input(x_ptr, before_ptr, tails_ptr, start, position, first, x_stride, tails_stride, c, C, inside, W, GATED)
        x = x.to(tails_ptr.dtype.element_ty)
        tl.store(tails_ptr + own.to(tl.int64) * tails_stride + i * C + c, x, inside)
        tl.store(tails_ptr + last.to(tl.int64) * tails_stride + i * C + c, x, inside & (last != 0))


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    gates: Gates | None = None,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x [T, C], weight [W, C], bias [C] -> y [T, C]; tails [N, W - 1, C] of all states are read and written.

    Rows of x and states of tails may lie apart, those of gates as far apart as x's. Tokens of no row have no result.
    """
    (window, channels), num_rows = weight.shape, len(rows.own)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kind, strides = {"BIAS": bias is not None, "GATED": gates is not None}, (x.stride(0), tails.stride(0), channels)
    before, after = (None, None) if gates is None else gates
    assert gates is None or {gate.stride(0) for gate in gates} == {x.stride(0)}
    if rows.windows is not None:
        convolution_windows.convolve_windows(x, weight, bias, tails, rows, y, gates, pdl=pdl)
    elif rows.has_decode:
        grid = rows.num_decode_rows or num_rows, triton.cdiv(channels, DECODE_CHANNELS)
        _decode_kernel[grid](
            x,
            weight,
            bias,
            tails,
            rows.own,
            rows.decode_limit,
            before,
            after,
            y,
            *strides,
            W=window,
            BLOCK=DECODE_CHANNELS,
            PDL=pdl,
            num_warps=DECODE_WARPS,
            **kind,
            **launch_options(pdl),
        )
    if rows.has_prefill:
        grid = max_chunks(len(x), num_rows), triton.cdiv(channels, CHUNK_CHANNELS)
        _prefill_kernel[grid](
            x,
            weight,
            bias,
            tails,
            rows.query_start,
            rows.first,
            rows.decode_limit,
            before,
            after,
            y,
            *strides,
            num_rows,
            W=window,
            BLOCK=CHUNK_CHANNELS,
            ROWS_2=rows_2(rows.own),
            **kind,
        )
        states = rows.own, rows.first, rows.last, rows.decode_limit
        grid = num_rows, triton.cdiv(channels, CHANNELS)
        _tails_kernel[grid](
            x, before, tails, rows.query_start, *states, *strides, W=window, GATED=gates is not None, BLOCK=CHANNELS
        )
    return y
