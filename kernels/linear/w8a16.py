"""Products with 8-bit weights, int8 or fp8, and 16-bit activations: 1 to 64 rows on a Hopper by its own ring (`w8a16_hopper`),
elsewhere by a portable kernel; cuBLAS on the dequantized weight beyond. One row of a small int8 weight goes to `w8a16_row`.

    y = x @ W^T + bias        gated: y = silu(g) * u of g | u = x @ W^T + bias
    W[n, k] = (q[n, k] - z[n, k // g]) * s[n, k // g]        group g of K: 32, 64, a multiple of 128, or all of it

x [M, K], y [M, N], bfloat16 or float16 (float32 in tests); sums in float32. Scales multiply sums over a group, so W is not
rounded: q - z is at most 256, which 16 bits hold exactly. An int8 is converted by its bits: with 128 added it is the low byte
of 2^23 in float32, from which 2^23 + 128 is subtracted. The product's second operand goes to shared memory or to a synchronous
mma, so no wgmma in flight reads a computed register. Split-K partial sums as in `split_linear`: float32 [S, M, N].
Reference: `Weight8.dequantized`, torch.nn.functional.linear.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated, silu_mul
from quire.kernels.linear import scaled, w8a16_row
from quire.kernels.linear.blas import blas_linear
from quire.kernels.linear.scaled import BLOCK, Config
from quire.kernels.linear.w8a16_weight import GROUPS, Weight8, supports
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.triton_support.hopper import block_rows
from quire.kernels.tuning.current import current

MAX_ROWS = 64
MAX_PARTS, MIN_PART = 8, 1024  # splits of K, and K of one split


@triton.jit
def _numbers(w, zero, dtype: tl.constexpr, ZEROS: tl.constexpr):
    """q - z as dtype, exactly; zero float32, broadcast over w."""
    if w.dtype == tl.int8:
        bits = (w.to(tl.int32) & 0xFF) ^ 0x4B000080
        value = bits.to(tl.float32, bitcast=True) - 8388736.0
        if ZEROS:
            value -= zero
        return value.to(dtype)
    return w.to(dtype)


@triton.jit
def _add_block(
    acc, x, w_ptr, w_mask, s_ptr, z_ptr, at, live, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] plus the products of a tile of K, all of one group; `at`: its scales [BLOCK_N]."""
    w = tl.load(w_ptr, w_mask, other=0.0, eviction_policy="evict_first")
    zero = tl.zeros([w.shape[1]], tl.float32)
    if ZEROS:
        zero = tl.load(z_ptr + at, live, other=0).to(tl.float32)
    numbers = _numbers(w, zero[None, :], dtype, ZEROS)
    if GROUPS == 1:
        return tl.dot(x, numbers, acc, input_precision="ieee")
    return acc + tl.dot(x, numbers, input_precision="ieee") * tl.load(s_ptr + at, live, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _finish(acc, s_ptr, bias_ptr, n, live, biased, GROUPS: tl.constexpr, BIAS: tl.constexpr):
    if GROUPS == 1:
        acc *= tl.load(s_ptr + n, live, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, biased, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, x_stride, out_stride, M, N,
    K: tl.constexpr, K_PART: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    first = part * K_PART
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live = n < N
    inside = (m < M)[:, None]
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    up_at = w_at + N.to(tl.int64) * K
    s_at = n * GROUPS
    us_at = (n + N) * GROUPS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_previous(PDL)
    for step in range(0, K_PART, BLOCK_K):
        start = first + step
        x = tl.load(x_at + start, inside & (k < K - start)[None, :], other=0.0)
        mask = (k < K - start)[:, None] & live[None, :]
        group = tl.minimum(start // GROUP, GROUPS - 1)  # tiles behind K, in the last split, use the last group
        acc = _add_block(acc, x, w_at + start, mask, s_ptr, z_ptr, s_at + group, live, dtype, GROUPS, ZEROS)
        if GATED:
            up = _add_block(up, x, up_at + start, mask, s_ptr, z_ptr, us_at + group, live, dtype, GROUPS, ZEROS)
    acc = _finish(acc, s_ptr, bias_ptr, n, live, live & (part == 0), GROUPS, BIAS)
    if GATED:
        acc = gated(acc, _finish(up, s_ptr + N, bias_ptr + N, n, live, live, GROUPS, BIAS), dtype)
    line = (part * M + m).to(tl.int64)[:, None]
    tl.store(out_ptr + line * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), inside & live[None, :])


@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, z_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (n < N) & (k < K)
    value = tl.load(w_ptr + n * K + k, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    at = n * GROUPS + k // GROUP
    if ZEROS:
        value -= tl.load(z_ptr + at, mask, other=0).to(tl.float32)
    value *= tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * K + k, value.to(out_ptr.dtype.element_ty), mask)


def dequantize(weight: Weight8, out: torch.Tensor) -> torch.Tensor:
    """W in out's dtype, into `out` [N, K]: as `dequantized`, in one pass over both."""
    (n, k), zeros = weight.data.shape, weight.scales if weight.zeros is None else weight.zeros
    if out.shape != (n, k) or not out.is_contiguous():
        raise ValueError(f"w8a16: a weight [{n}, {k}] does not go to {tuple(out.shape)}")
    _dequantize_kernel[(triton.cdiv(n, 4), triton.cdiv(k, 512))](
        weight.data, weight.scales, zeros, out, n, k, weight.group, weight.scales.shape[1], 4, 512, weight.zeros is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def launch(
    x: torch.Tensor,
    weight: Weight8,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel for 1 to 64 rows of x, columns in the weight's order; out [M, N], gated [M, N / 2], or sums [S, M, N].

    Raises ValueError if shapes or types do not fit.
    """
    (rows, k), columns, parts = x.shape, weight.outputs, len(out) if out.dim() == 3 else 1
    n, groups = columns // 2 if is_gated else columns, weight.scales.shape[1]
    shape = (rows, n) if out.dim() == 2 else (parts, rows, n)
    fits = weight.data.shape == (columns, k) and out.shape == shape and (bias is None or bias.shape == (columns,))
    if not fits or not 1 <= rows <= MAX_ROWS or weight.scales.shape != (columns, triton.cdiv(k, weight.group)):
        raise ValueError(f"w8a16: x {x.shape}, weight {weight.data.shape}, out {out.shape} do not fit, or too many rows")
    if out.dim() == 3 and (is_gated or out.dtype != torch.float32 or not out.is_contiguous()):
        raise ValueError("w8a16: parts are float32 side by side, and not gated")
    out_dtype = x.dtype if out.dim() == 2 else torch.float32
    if out.dtype != out_dtype or not x.stride(1) == out.stride(-1) == 1 or not weight.data.is_contiguous():
        raise ValueError("w8a16: x and out need one dtype and unit stride in the last dimension, a weight to be contiguous")
    if not supports(weight.group, k):
        raise ValueError(f"w8a16: groups of {weight.group} of {k} inputs are not computed: take {GROUPS}")
    zeros, block_k = weight.scales if weight.zeros is None else weight.zeros, BLOCK if groups == 1 else min(weight.group, BLOCK)
    part = triton.cdiv(k, parts * block_k) * block_k
    _kernel[(triton.cdiv(n, config.block_n), parts)](
        x, weight.data, weight.scales, zeros, x if bias is None else bias, out, x.stride(0), out.stride(-2), rows, n,
        k, part, weight.group, groups, block_rows(rows), config.block_n, block_k, weight.zeros is not None, bias is not None,
        is_gated, pdl, num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl),
    )  # fmt: skip


def choose(x: torch.Tensor, n: int, *, is_gated: bool) -> Config:
    """The configuration for n output columns: `scaled`'s, with fewer stages if then two programs fit an SM."""
    config = scaled.choose(len(x), n)
    if config.block_m > 32 and is_gated:
        config = config._replace(num_stages=3)
    stage = BLOCK * (config.block_m * x.element_size() + config.block_n * (2 if is_gated else 1))
    fitting = hopper.shared_bytes(x.device) // stage
    return config._replace(num_stages=max(1, min(config.num_stages, fitting)))


def num_splits(rows: int, n: int, k: int, block_n: int, sms: int) -> int:
    """Splits of K that give as many programs as two an SM; 1 for many rows."""
    tiles, parts = triton.cdiv(n, block_n), 1
    while 1 <= rows <= MAX_ROWS and parts < MAX_PARTS and tiles * parts <= sms and k >= parts * 2 * MIN_PART:
        parts *= 2
    return parts


def _is_one_row(x: torch.Tensor, weight: Weight8) -> bool:
    """Whether one row's own kernel computes it: for a large W Hopper's ring does."""
    is_large = weight.data.numel() >= current().scaled.ring_weight and hopper.available(x.device)
    return w8a16_row.supports(x, weight.data) and not is_large


def _streams(x: torch.Tensor, weight: Weight8) -> bool:
    """Whether Hopper's ring computes it."""
    if not 1 <= len(x) <= MAX_ROWS or not hopper.available(x.device) or _is_one_row(x, weight):
        return False
    from quire.kernels.linear import w8a16_hopper  # imports Gluon, which other GPUs' Triton may not have

    return w8a16_hopper.supports(x, weight)


def w8a16_linear(
    x: torch.Tensor,
    weight: Weight8,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ W^T + bias [M, N]; gated: silu(g) * u of its halves, [M, N / 2]; columns of x in the weight's order.

    More than 64 rows use cuBLAS, on W dequantized into scratch: 2 N K bytes while it runs.
    """
    rows, n = len(x), weight.outputs // 2 if is_gated else weight.outputs
    if rows > MAX_ROWS:
        dense = dequantize(weight, x.new_empty(weight.data.shape))
        return silu_mul(blas_linear(x, dense, bias), out, pdl=pdl) if is_gated else blas_linear(x, dense, bias, out)
    if _streams(x, weight):
        from quire.kernels.linear import w8a16_hopper

        return w8a16_hopper.linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
    out = x.new_empty((rows, n)) if out is None else out
    if _is_one_row(x, weight):
        config = w8a16_row.choose(n, weight.data.shape[1] // w8a16_row.WORD)
        scales = (weight.scales, weight.zeros, weight.group)
        w8a16_row.launch(x, weight.data, *scales, bias, out, config, is_gated=is_gated, pdl=pdl)
    elif rows:
        launch(x, weight, bias, out, choose(x, n, is_gated=is_gated), is_gated=is_gated, pdl=pdl)
    return out


def w8a16_linear_split_k(
    x: torch.Tensor, weight: Weight8, bias: torch.Tensor | None = None, *, pdl: int = PLAIN
) -> torch.Tensor:
    """As `w8a16_linear`, or float32 partial sums [S, M, N] for a norm, if one product has too few tiles for the GPU."""
    if _streams(x, weight):
        from quire.kernels.linear import w8a16_hopper

        return w8a16_hopper.linear_split_k(x, weight, bias, pdl=pdl)
    config = choose(x, weight.outputs, is_gated=False)
    parts = num_splits(len(x), weight.outputs, weight.data.shape[1], config.block_n, hopper.num_sms(x.device))
    if parts == 1 or _is_one_row(x, weight):
        return w8a16_linear(x, weight, bias, pdl=pdl)
    out = torch.empty(parts, len(x), weight.outputs, dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, config, pdl=pdl)
    return out
