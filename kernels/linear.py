"""Skinny linear layers: y = x @ W^T + bias for 1 to 16 rows, where reading W is all the work.

    x [M, K], W [N, K], bias [N] or none, y [M, N]; bfloat16 or float16 (float32 in tests), accumulated in float32, rounded
    once.

Moves N * K elements of W, once, marked evict-first: the weights of a model do not fit into L2, and x and y should stay there.
Up to 4 rows: one program per few output columns, products and sums on the plain cores, all of K within the program. More rows:
tensor cores on tiles of 16 rows x BLOCK_N columns. The order of summation depends on the shape alone, not on what other rows
hold; but it differs between the number-of-rows classes, so a row's last bits may change with M, as they do with cuBLAS.
`skinny_linear` takes any M and hands to cuBLAS what is not skinny; torch.nn.functional.linear is the reference.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

MAX_ROWS = 16  # beyond it cuBLAS is at the memory's speed too
MAX_VECTOR_ROWS = 4  # of the kernel without tensor cores


class Config(NamedTuple):
    dot: bool  # on tensor cores
    block_n: int  # output columns of a program
    block_k: int
    num_warps: int
    num_stages: int  # loads in flight ahead of the arithmetic


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, N,
    K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """M = 1 to 4 rows: one accumulator tile [BLOCK_N, BLOCK_K] a row, summed over K at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = w_ptr + n.to(tl.int64)[:, None] * w_stride
    inside = (n < N)[:, None]
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = k < K
        w = tl.load(w_row + k[None, :], inside & k_mask[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc0 += w * tl.load(x_ptr + k, k_mask, other=0.0).to(tl.float32)[None, :]
        if M > 1:
            acc1 += w * tl.load(x_ptr + x_stride + k, k_mask, other=0.0).to(tl.float32)[None, :]
        if M > 2:
            acc2 += w * tl.load(x_ptr + 2 * x_stride + k, k_mask, other=0.0).to(tl.float32)[None, :]
        if M > 3:
            acc3 += w * tl.load(x_ptr + 3 * x_stride + k, k_mask, other=0.0).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bias = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
    out = out_ptr + n
    dtype = out_ptr.dtype.element_ty
    tl.store(out, (tl.sum(acc0, 1) + bias).to(dtype), n < N)
    if M > 1:
        tl.store(out + out_stride, (tl.sum(acc1, 1) + bias).to(dtype), n < N)
    if M > 2:
        tl.store(out + 2 * out_stride, (tl.sum(acc2, 1) + bias).to(dtype), n < N)
    if M > 3:
        tl.store(out + 3 * out_stride, (tl.sum(acc3, 1) + bias).to(dtype), n < N)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, M, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows on tensor cores; rows beyond M are zero and cost no traffic."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * x_stride + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK_K):
        x_mask = (m < M)[:, None] & (k < K - start)[None, :]
        w_mask = (k < K - start)[:, None] & (n < N)[None, :]
        x = tl.load(x_at + start, x_mask, other=0.0)
        w = tl.load(w_at + start, w_mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def choose(rows: int, n: int, k: int) -> Config:
    """The configuration for a shape; found with benchmarks/kernels_small.py --tune."""
    block_k = triton.next_power_of_2(k)
    if rows == 1:
        return Config(False, 2 if n >= 4096 else 1, min(block_k, 2048), 4, 1)
    if rows <= MAX_VECTOR_ROWS:
        return Config(False, 2, min(block_k, 512), 4, 1)
    return Config(True, 16 if n <= 4096 else 32, min(max(block_k, 16), 256), 4, 4)


def launch_skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, config: Config, *, pdl: bool = False
) -> None:
    """Run our kernel, whatever the shape is worth: 1 to 16 rows of a float dtype."""
    (rows, k), n = x.shape, weight.shape[0]
    bias_fits = bias is None or bias.shape == (n,)
    if weight.shape != (n, k) or out.shape != (rows, n) or not 1 <= rows <= MAX_ROWS or not bias_fits:
        raise ValueError(f"skinny_linear: x {x.shape}, weight {weight.shape}, out {out.shape} do not fit, or too many rows")
    if not x.dtype == weight.dtype == out.dtype or not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        raise ValueError("skinny_linear: x, weight and out need one dtype, and unit stride in the last dimension")
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    extra = {"launch_pdl": True} if pdl else {}
    arguments = (x, weight, x if bias is None else bias, out, *strides)
    grid = (triton.cdiv(n, config.block_n),)
    shape = (config.block_n, config.block_k, bias is not None, pdl)
    if config.dot:
        _dot_kernel[grid](*arguments, rows, n, k, *shape, num_warps=config.num_warps, num_stages=config.num_stages, **extra)
    elif rows <= MAX_VECTOR_ROWS:
        _vector_kernel[grid](*arguments, n, k, rows, *shape, config.num_stages, num_warps=config.num_warps, **extra)
    else:
        raise ValueError(f"skinny_linear: {rows} rows need the kernel on tensor cores")


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias: by our kernel for 1 to 16 rows of a 16-bit dtype, by cuBLAS otherwise."""
    rows = x.shape[0]
    if not 1 <= rows <= MAX_ROWS or x.dtype.itemsize != 2 or x.stride(1) != 1 or weight.stride(1) != 1:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    out = x.new_empty((rows, weight.shape[0])) if out is None else out
    launch_skinny(x, weight, bias, out, choose(rows, *weight.shape), pdl=pdl)
    return out
