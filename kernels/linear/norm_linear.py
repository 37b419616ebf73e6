"""One row's residual addition, RMSNorm and product in one kernel, for when launches, not bytes, are the cost.

    s = residual + x;   h = norm_weight * cast(s / sqrt(mean(s^2) + eps));   y = h @ W^T + bias
    gated: y = silu(g) * u of g | u = h @ W^T + bias

x, residual [1, K] (x may be None: s = residual), W [N, K], norm_weight [K], bias [N] or None; y [1, N], or [1, N / 2] if gated;
bfloat16 or float16 (float32 in tests), rounded where `norm` and `linear` round. Every program computes the norm of the row
again, beside its few output columns; the first also writes s, to a buffer of its own, since the others still read the residual.
Moves W once. 0.6B: saves two launches a layer; if W is large, repeating the norm costs more than that (`pays`).
The first programs may compute A h of the row's LoRA adapter (`tables.Shrink`), as others W h.
References: `norm_reference`, torch.nn.functional.linear.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.lora.rows import rows_of_a
from quire.kernels.lora.tables import RANK_STEP, Shrink
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import linear_tuning

MAX_K = 4096  # limit of a row in a program


@triton.jit
def _normed(x_ptr, residual_ptr, sum_ptr, norm, k, k_mask, eps, K: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """float32 [BLOCK_K], h rounded to the dtype of the residual."""
    wait_for_previous(PDL)
    s = tl.load(residual_ptr + k, k_mask, other=0.0)
    dtype: tl.constexpr = s.dtype
    if ADD:
        s = (s.to(tl.float32) + tl.load(x_ptr + k, k_mask, other=0.0).to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(sum_ptr + k, s, k_mask)
    wide = s.to(tl.float32)
    h = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)).to(dtype).to(tl.float32) * norm.to(tl.float32)
    return h.to(dtype).to(tl.float32)


@triton.jit
def _norm_linear_kernel(
    x_ptr, residual_ptr, norm_ptr, w_ptr, bias_ptr, sum_ptr, out_ptr, a_ptr, ranks, ids, adapter_h, w_stride, N, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, RANK_STEP: tl.constexpr,
):  # fmt: skip
    SHRINKS: tl.constexpr = (PIECES * R + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if SHRINKS == 0:
        _product(
            program,
            x_ptr,
            residual_ptr,
            norm_ptr,
            w_ptr,
            bias_ptr,
            sum_ptr,
            out_ptr,
            w_stride,
            N,
            eps,
            K,
            BLOCK_N,
            BLOCK_K,
            ADD,
            BIAS,
            GATED,
            PDL,
        )
    elif program >= SHRINKS:
        _product(
            program - SHRINKS,
            x_ptr,
            residual_ptr,
            norm_ptr,
            w_ptr,
            bias_ptr,
            sum_ptr,
            out_ptr,
            w_stride,
            N,
            eps,
            K,
            BLOCK_N,
            BLOCK_K,
            ADD,
            BIAS,
            GATED,
            PDL,
        )
    else:
        n = program * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        k_mask = k < K
        norm = tl.load(norm_ptr + k, k_mask, other=0.0)
        row, has_rank, kept = rows_of_a(ids, ranks, n, PIECES, R, RANK_STEP)
        a = tl.load(a_ptr + row[:, None] * K + k[None, :], has_rank[:, None] & k_mask[None, :], other=0.0)
        h = _normed(x_ptr, residual_ptr, sum_ptr, norm, k, k_mask, eps, K, ADD, PDL)
        tl.store(adapter_h + n, tl.sum(a.to(tl.float32) * h[None, :], 1), kept)


@triton.jit
def _product(
    program,
    x_ptr,
    residual_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    w_stride,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    k_mask = k < K
    tile = (n < N)[:, None] & k_mask[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :], tile, other=0.0, eviction_policy="evict_first")
    up = w
    if GATED:
        up_row = w_ptr + (n + N).to(tl.int64)[:, None] * w_stride
        up = tl.load(up_row + k[None, :], tile, other=0.0, eviction_policy="evict_first")
    norm = tl.load(norm_ptr + k, k_mask, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    h = _normed(x_ptr, residual_ptr, sum_ptr, norm, k, k_mask, eps, K, ADD, PDL)[None, :]
    y = tl.sum(w.to(tl.float32) * h, 1)
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
    if GATED:
        u = tl.sum(up.to(tl.float32) * h, 1)
        if BIAS:
            u += tl.load(bias_ptr + N + n, n < N, other=0.0).to(tl.float32)
        y = gated(y, u, dtype)
    tl.store(out_ptr + n, y.to(dtype), n < N)


def pays(residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm_linear` is both possible and faster than a norm and a product."""
    is_small = residual.shape[1] <= MAX_K and weight.numel() <= linear_tuning().norm_linear_weight
    return residual.shape[0] == 1 and is_small and residual.dtype.itemsize == 2 and weight.stride(1) == 1


def choose(k: int) -> tuple[int, int]:
    """Output columns and warps of a program."""
    tiles = linear_tuning().norm_linear_tiles
    return next(((block_n, warps) for limit, block_n, warps in tiles if k <= limit), tiles[-1][1:])


def norm_linear(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
    shrink: Shrink | None = None,
    adapter_h: torch.Tensor | None = None,
    pdl: int = PLAIN,
    config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, residual + x), for one row; the residual itself is not modified. `config`, as from `choose`, is for tuning.

    shrink: an adapter that the row may have; adapter_h float32 [1, P * R] gets A h.
    """
    columns, k = weight.shape
    n = columns // 2 if is_gated else columns
    added = residual if x is None else x
    fits = residual.shape == added.shape == (1, k) and norm_weight.shape == (k,) and columns == (2 * n if is_gated else n)
    if not fits or k > MAX_K or (bias is not None and bias.shape != (columns,)):
        raise ValueError(
            f"norm_linear: {added.shape}, residual {residual.shape}, {norm_weight.shape}, {weight.shape} do not fit"
        )
    if len({t.dtype for t in (added, residual, norm_weight, weight)}) > 1:
        raise TypeError("norm_linear: x, the residual and the weights need one dtype")
    if not added.stride(1) == residual.stride(1) == norm_weight.stride(0) == weight.stride(1) == 1:
        raise ValueError("norm_linear: the last dimension must have stride 1")
    total = residual if x is None else torch.empty_like(residual)
    out = residual.new_empty((1, n))
    block_k = triton.next_power_of_2(k)
    block_n, num_warps = config or choose(k)
    adapter, sizes = ((shrink.a, shrink.ranks, shrink.ids, adapter_h), shrink.a.shape[1:3]) if shrink else ((None,) * 4, (0, 0))
    programs = triton.cdiv(n, block_n) + triton.cdiv(sizes[0] * sizes[1], block_n)
    _norm_linear_kernel[(programs,)](
        added, residual, norm_weight, weight, weight if bias is None else bias, total, out, *adapter, weight.stride(0), n, eps,
        k, block_n, block_k, x is not None, bias is not None, is_gated, pdl, *sizes, RANK_STEP,
        num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out, total
