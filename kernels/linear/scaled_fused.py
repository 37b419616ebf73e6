"""One row's inputs, quantized from 16 bits to 8, and their product with 8-bit weights in one kernel: for cases in which
launches are the cost, not bytes.

    x                                      q = cast(x / s)                      `quantize`
    gate | up                              of silu(gate) * up                   `silu_mul_quantize`
    residual, and x if there is one        of the norm of residual + x          `rms_norm_quantize`

y = (q @ W^T) as in `scaled_row`, [1, N]. Every program computes the row again, beside its few output columns, as in
`norm_linear` for 16 bits; with a norm the first also writes residual + x, to a buffer of its own, since the others still read
the residual. Moves W once. If W is large, the repetition costs more than the launches saved (`pays`). References:
`quantize_reference`, `scaled.Scaled.dequantized`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.linear.quantize import LARGEST, cast, scale_of
from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

MAX_K = 4096  # limit of a row in a program
MANY_COLUMNS = 4096


@triton.jit
def _normed(x_ptr, residual_ptr, sum_ptr, norm, k, mask, eps, K: tl.constexpr, ADD: tl.constexpr):
    """The norm of residual + x, float32, rounded as if it had been stored; the first program writes the sum."""
    total = tl.load(residual_ptr + k, mask, other=0.0)
    dtype: tl.constexpr = total.dtype
    if ADD:
        total = (total.to(tl.float32) + tl.load(x_ptr + k, mask, other=0.0).to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(sum_ptr + k, total, mask)
    wide = total.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)).to(dtype).to(tl.float32)
    return (normed * norm.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _kernel(
    x_ptr, residual_ptr, norm_ptr, static_ptr, w_ptr, ws_ptr, bias_ptr, sum_ptr, out_ptr, w_stride, N, eps,
    K: tl.constexpr, W_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIZE: tl.constexpr,
    LARGEST: tl.constexpr, STATIC: tl.constexpr, INT: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = n < N
    mask = k < K
    tile = live[:, None] & mask[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :], tile, other=0.0, eviction_policy="evict_first")
    norm = tl.zeros([BLOCK_K], tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + k, mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if NORM:
        x = _normed(x_ptr, residual_ptr, sum_ptr, norm, k, mask, eps, K, ADD)
    else:
        x = tl.load(x_ptr + k, mask, other=0.0)
        if SILU:
            dtype: tl.constexpr = x.dtype
            x = gated(x, tl.load(x_ptr + K + k, mask, other=0.0), dtype).to(dtype)
        x = x.to(tl.float32)
    PIECES: tl.constexpr = BLOCK_K // SIZE
    pieces = x.reshape(PIECES, SIZE)
    if STATIC:
        scale = tl.zeros([PIECES], tl.float32) + tl.load(static_ptr)
    else:
        scale = scale_of(tl.max(tl.abs(pieces), 1), LARGEST)
    spread = tl.broadcast_to(scale[:, None], [PIECES, SIZE])
    q = cast(pieces, scale, LARGEST, w.dtype, STATIC)
    if INT and W_BLOCKS == 1:
        sums = tl.sum(w.to(tl.int32) * q.reshape(BLOCK_K).to(tl.int32)[None, :], 1).to(tl.float32)
        y = sums * tl.max(scale, 0) * tl.load(ws_ptr + n, live, other=0.0)
    elif W_BLOCKS == 1:
        sums = tl.sum(w.to(tl.float32) * q.reshape(BLOCK_K).to(tl.float32)[None, :], 1)
        y = sums * tl.max(scale, 0) * tl.load(ws_ptr + n, live, other=0.0)
    else:
        values = (q.to(tl.float32) * spread).reshape(BLOCK_K)
        values *= tl.load(ws_ptr + first // 128 * W_BLOCKS + k // 128, mask, other=0.0)
        y = tl.sum(w.to(tl.float32) * values[None, :], 1)
    if BIAS:
        y += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), live)


def pays(rows: int, weight: Scaled) -> bool:
    """Whether this is both possible and faster than one launch for the inputs and one for the product."""
    n, k = weight.data.shape
    blocks = weight.scales.shape[1] > 1
    is_small = k <= MAX_K and n * k <= current().scaled.fused_weight
    return rows == 1 and is_small and weight.rows == (BLOCK if blocks else 1) and weight.data.stride(1) == 1


def choose(n: int, k: int, is_int8: bool) -> tuple[int, int]:
    """Output columns of a program, of n in all, and its warps: few programs, since each computes the row again.

    For Qwen3-0.6B's four products in fp8 a sweep found 2 % less. int8 takes twice the registers: 252 with 16 columns, at K =
    4096, where fp8 takes 122.
    """
    return 4 if n < MANY_COLUMNS else 8 if is_int8 else 16, max(1, _block_k(k) // 512)


def _block_k(k: int) -> int:
    return max(BLOCK, triton.next_power_of_2(k))


def fused_linear(
    x: torch.Tensor | None,
    weight: Scaled,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    by_block: bool = False,
    static_scale: torch.Tensor | None = None,
    is_gate_up: bool = False,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y [1, N] in dtype, residual + x), for one row x [1, K], or [1, 2 K] = gate | up if is_gate_up.

    norm: (residual [1, K], weight [K], eps); then x may be None, and the sum is the residual itself. Without a norm the sum is
    None. Raises ValueError if shapes or types do not fit.
    """
    (n, k), blocks = weight.data.shape, weight.scales.shape[1]
    given = x if norm is None else norm[0]
    if given is None or not pays(1, weight) or given.shape != (1, 2 * k if is_gate_up else k):
        raise ValueError(f"scaled_fused: weight {weight.data.shape} and its input do not fit, or are too large")
    if given.stride(1) != 1 or given.dtype != dtype or (by_block and blocks == 1 and k > BLOCK):
        raise ValueError(
            "scaled_fused: an input needs the result's dtype and unit stride, and blocks of it blocks of the weight"
        )
    residual, norm_weight, eps = (given, given, 0.0) if norm is None else norm
    if norm is not None and (norm_weight.shape != (k,) or (x is not None and (x.shape != (1, k) or x.dtype != dtype))):
        raise ValueError(f"scaled_fused: {norm_weight.shape} and x do not fit a norm of {k}")
    total = None if norm is None else residual if x is None else torch.empty_like(residual)
    out = given.new_empty((1, n))
    block_k, (block_n, num_warps) = _block_k(k), choose(n, k, weight.data.dtype == torch.int8)
    _kernel[(triton.cdiv(n, block_n),)](
        given if x is None else x, residual, norm_weight, out if static_scale is None else static_scale, weight.data,
        weight.scales, weight.scales if bias is None else bias, out if total is None else total, out, weight.data.stride(0), n,
        eps, k, blocks, block_n, block_k, BLOCK if by_block else block_k, LARGEST[weight.data.dtype],
        static_scale is not None, weight.data.dtype == torch.int8, norm is not None, norm is not None and x is not None,
        is_gate_up, bias is not None, pdl, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out, total
