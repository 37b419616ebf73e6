"""Sums and maxima over the tokens of rows: what poolers make of the hidden states of texts.

    sum        out[r] = sum of x[t]                              t in [firsts[r], ends[r])
    weighted   out[r] = sum of (t - origins[r] + 1) x[t]
    max        out[r] = maximum of x[t] by element, -inf for a row without tokens

x [T, H] float32, float16 or bfloat16, any row stride; firsts, ends, origins int32 [R]; out float32 [R, H]. A program takes a
row and some columns and runs over its tokens in order, so a row's result does not depend on the others. Moves T * H elements.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.pooling.segments_cpu import How

COLUMNS, TOKENS = 64, 32


@triton.jit(do_not_specialize=["num_tokens"])
def _segments_kernel(
    x_ptr,
    out_ptr,
    firsts_ptr,
    ends_ptr,
    origins_ptr,
    num_tokens,
    stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MAX: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    first = tl.maximum(tl.load(firsts_ptr + row), 0)
    end = tl.minimum(tl.load(ends_ptr + row), num_tokens)
    origin = tl.load(origins_ptr + row)
    offsets = tl.arange(0, TOKENS)
    neutral = float("-inf") if MAX else 0.0
    total = tl.full([TOKENS, COLUMNS], neutral, tl.float32)
    for begin in range(first, end, TOKENS):
        tokens = begin + offsets
        mask = (tokens < end)[:, None] & inside[None, :]
        x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=neutral).to(tl.float32)
        if WEIGHTED:
            x = x * (tokens - origin + 1).to(tl.float32)[:, None]
        if MAX:
            total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += x
    result = tl.max(total, 0) if MAX else tl.sum(total, 0)
    if MAX:  # a reduction drops NaN, which must fail its request
        result = tl.where(tl.max((total != total).to(tl.int32), 0) > 0, float("nan"), result)
    tl.store(out_ptr + row.to(tl.int64) * SIZE + columns, result, mask=inside)


def segments(x: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor, origins: torch.Tensor, how: How) -> torch.Tensor:
    """float32 [R, H] of x [T, H] over tokens [firsts, ends) of each row; origins: where weights begin with 1."""
    if x.stride(1) != 1 or any(at.dtype != torch.int32 or at.shape != firsts.shape for at in (firsts, ends, origins)):
        raise ValueError("x must be dense in its last dimension; firsts, ends and origins must be int32 [R]")
    out = torch.empty(len(firsts), x.shape[1], dtype=torch.float32, device=x.device)
    if out.numel():
        grid = len(firsts), triton.cdiv(x.shape[1], COLUMNS)
        _segments_kernel[grid](
            x, out, firsts, ends, origins, len(x), x.stride(0), x.shape[1], COLUMNS, TOKENS, how == "weighted", how == "max"
        )
    return out
