"""The product of one row of scaled 8-bit operands, on the plain cores: many small programs, as in `linear` for 16 bits.

Operands, scales and results as in `scaled`, gated too; W's scales are per row or per group of 128 x 128, x's per token or per
group. W moves once. At the memory's full rate an SM has 7 issue slots a weight: a conversion to float32 takes one and a half,
the product one. A group's scales are multiplied into x, which a program's rows share: all of them lie in one 2-D group of W.
int8 is summed in int32, so the result is the reference's to the bit. References: `scaled.Scaled.dequantized`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.linear.scaled import BLOCK, Scaled, check
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous


class Config(NamedTuple):
    block_n: int  # output columns of a program, a power of two up to 128
    block_k: int
    num_warps: int


@triton.jit
def _tile(w_row, k, inside, K: tl.constexpr):
    return tl.load(w_row + k[None, :], inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _add(
    acc, w, x, xs_ptr, ws_ptr, ws_at, k, K: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_K] plus the products of a tile; ws_at: the number of the 2-D group of W's rows, if it has groups."""
    if EXACT:
        acc += w.to(tl.int32) * x.to(tl.int32)[None, :]
    else:
        wide = x.to(tl.float32)
        if W_BLOCKS > 1:
            wide *= tl.load(ws_ptr + ws_at * W_BLOCKS + k // 128, k < K, other=0.0)
        if X_BLOCKS > 1:
            wide *= tl.load(xs_ptr + k // 128, k < K, other=0.0)
        acc += w.to(tl.float32) * wide[None, :]
    return acc


@triton.jit
def _finish(acc, xs_ptr, ws_ptr, bias_ptr, n, live, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, BIAS: tl.constexpr):
    y = tl.sum(acc, 1).to(tl.float32)
    if X_BLOCKS == 1:
        y *= tl.load(xs_ptr)
    if W_BLOCKS == 1:
        y *= tl.load(ws_ptr + n, live, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)
    return y


@triton.jit
def _kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, w_stride, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, INT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = n < N
    row = w_ptr + n.to(tl.int64)[:, None] * w_stride
    up_row = row + N.to(tl.int64) * w_stride
    w = _tile(row, k, live[:, None], K)
    up = w
    if GATED:
        up = _tile(up_row, k, live[:, None], K)
    wait_for_previous(2 if PDL > 0 else 0)  # many small programs, always: EARLY
    EXACT: tl.constexpr = INT and W_BLOCKS == 1
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.int32 if EXACT else tl.float32)
    up_acc = acc
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k
        if start > 0:
            w = _tile(row, at, live[:, None], K)
            if GATED:
                up = _tile(up_row, at, live[:, None], K)
        x = tl.load(x_ptr + at, at < K, other=0.0)
        acc = _add(acc, w, x, xs_ptr, ws_ptr, first // 128, at, K, X_BLOCKS, W_BLOCKS, EXACT)
        if GATED:
            up_acc = _add(up_acc, up, x, xs_ptr, ws_ptr, (first + N) // 128, at, K, X_BLOCKS, W_BLOCKS, EXACT)
    y = _finish(acc, xs_ptr, ws_ptr, bias_ptr, n, live, X_BLOCKS, W_BLOCKS, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        y = gated(y, _finish(up_acc, xs_ptr, ws_ptr + N, bias_ptr + N, n, live, X_BLOCKS, W_BLOCKS, BIAS), dtype)
    tl.store(out_ptr + n, y.to(dtype), live)


def supports(x: Scaled, weight: Scaled, n: int, *, is_gated: bool) -> bool:
    """Whether x is one row, and W's scales are per row or per group of 128 x 128; gate and up in groups of their own."""
    if len(x.data) != 1 or weight.data.stride(1) != 1:
        return False
    blocks = weight.scales.shape[1] > 1
    return weight.rows == BLOCK and (not is_gated or n % BLOCK == 0) if blocks else weight.rows == 1


def choose(n: int, k: int) -> Config:
    """The configuration for n output columns: estimated, not measured; 32 weights a thread at a time."""
    block_k = max(128, min(1024 if k >= 2048 else 512, triton.next_power_of_2(k)))
    block_n = 4 if n >= 1024 else 2
    return Config(block_n, block_k, max(1, block_n * block_k // 1024))


def launch(
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel for operands that it `supports`; out [1, N], gated [1, N / 2]. Raises ValueError as `check`."""
    check(x, weight, bias, out, is_gated)
    k, n = x.data.shape[1], out.shape[1]
    if not supports(x, weight, n, is_gated=is_gated) or BLOCK % config.block_n:
        raise ValueError(f"scaled_row: x {x.data.shape} and scales {weight.scales.shape} are not for this kernel")
    _kernel[(triton.cdiv(n, config.block_n),)](
        x.data, x.scales, weight.data, weight.scales, weight.scales if bias is None else bias, out, weight.data.stride(0), n,
        k, x.scales.shape[1], weight.scales.shape[1], x.data.dtype == torch.int8, config.block_n, config.block_k,
        bias is not None, is_gated, pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
