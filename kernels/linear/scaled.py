"""Products of 8-bit operands with scales, float8_e4m3fn or int8 both: the weight, and our portable kernel.

    y[m, n] = sum_k x[m, k] * xs[m, k // 128] * W[n, k] * ws[n // R, k // 128] + bias[n]        gated: as in `linear`

xs float32 [M, 1] (per token) or [M, ceil(K / 128)]; ws float32, with one row for R rows of W: R = 1, [N, 1 or ceil(K / 128)],
or R = 128, [ceil(N / 128), ceil(K / 128)], for 2-D groups. y bfloat16 or float16 (float32 in tests), rounded once.

Hopper's tensor cores keep some 14 bits of a running sum of fp8 products, so every 128 of K the sum is added in float32. Sums of
int8 are exact in int32: with scales per token and row y is the reference's to the bit. On a Hopper, 1 to 64 rows go to
`scaled_hopper`, more to `scaled_wide`; `fp8` and `int8` choose. Operands stay in shared memory: no wgmma reads computed
registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import cached, current

BLOCK = 128  # along K: a scale's group if there are several, and a sum's length before it is added in float32
MAX_BUCKET = 512  # rows beyond which `scaled_wide` has two more configurations


class Scaled(NamedTuple):
    """`data` [N, K], float8_e4m3fn or int8; `scales` float32 [ceil(N / rows), 1 or ceil(K / 128)]. x has rows = 1."""

    data: torch.Tensor
    scales: torch.Tensor
    rows: int = 1  # of data for one row of scales: 1 or 128

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in plain torch."""
        n, k = self.data.shape
        scales = self.scales if self.rows == 1 else self.scales.repeat_interleave(self.rows, 0)[:n]
        scales = scales if scales.shape[1] == 1 else scales.repeat_interleave(BLOCK, 1)[:, :k]
        return (self.data.float() * scales).to(dtype)


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _step(
    acc, x, w_ptr, w_mask, xs, ws_ptr, ws_at, live, block,
    INT: tl.constexpr, W_BLOCKS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] plus the products of a group of K."""
    w = tl.load(w_ptr, w_mask, other=0.0, eviction_policy="evict_first")
    if INT and W_BLOCKS == 1:
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    else:
        part = tl.dot(x, w, out_dtype=tl.int32 if INT else tl.float32).to(tl.float32)
        scale = xs[:, None]  # here, not at the end: the compiler would merge a plain sum with the product before it
        if W_BLOCKS > 1:
            scale = scale * tl.load(ws_ptr + ws_at + block, live, other=0.0)[None, :]
        acc += part * scale
    return acc


@triton.jit
def _finish(acc, xs, ws_ptr, ws_at, bias_ptr, n, live, INT: tl.constexpr, W_BLOCKS: tl.constexpr, BIAS: tl.constexpr):
    if W_BLOCKS == 1:
        if INT:
            acc = acc.to(tl.float32) * xs[:, None]
        acc = acc * tl.load(ws_ptr + ws_at, live, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["M"])
def _scaled_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, M, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, W_ROWS: tl.constexpr, INT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # adjacent programs share columns of W
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    inside = m < M
    live = n < N
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    up_at = w_at + N.to(tl.int64) * w_stride
    ws_at = n // W_ROWS * W_BLOCKS
    us_at = (n + N) // W_ROWS * W_BLOCKS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT and W_BLOCKS == 1 else tl.float32)
    up = acc
    wait_for_previous(PDL)
    xs = tl.load(xs_ptr + m * X_BLOCKS, inside, other=0.0)
    for start in range(0, K, 128):
        block = start // 128
        if X_BLOCKS > 1:
            xs = tl.load(xs_ptr + m * X_BLOCKS + block, inside, other=0.0)
        x = tl.load(x_at + start, inside[:, None] & (k < K - start)[None, :], other=0.0)
        w_mask = (k < K - start)[:, None] & live[None, :]
        acc = _step(acc, x, w_at + start, w_mask, xs, ws_ptr, ws_at, live, block, INT, W_BLOCKS)
        if GATED:
            up = _step(up, x, up_at + start, w_mask, xs, ws_ptr, us_at, live, block, INT, W_BLOCKS)
    y = _finish(acc, xs, ws_ptr, ws_at, bias_ptr, n, live, INT, W_BLOCKS, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        y = gated(y, _finish(up, xs, ws_ptr, us_at, bias_ptr + N, n, live, INT, W_BLOCKS, BIAS), dtype)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], y.to(dtype), inside[:, None] & live[None, :])


def check(x: Scaled, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, is_gated: bool) -> None:
    """Raise ValueError if shapes or types do not fit; for all kernels of scaled products."""
    (rows, k), columns = x.data.shape, weight.data.shape[0]
    n, blocks = columns // 2 if is_gated else columns, triton.cdiv(k, BLOCK)
    fits = weight.data.shape == (columns, k) and out.shape[-2:] == (rows, n) and columns == (2 * n if is_gated else n)
    if not fits or x.rows != 1 or x.scales.shape[0] != rows or (bias is not None and bias.shape != (columns,)):
        raise ValueError(f"scaled product: x {x.data.shape}, weight {weight.data.shape}, out {out.shape} do not fit")
    if x.data.dtype != weight.data.dtype or x.data.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise ValueError(f"scaled product: {x.data.dtype} times {weight.data.dtype} is not computed")
    if not x.data.stride(1) == weight.data.stride(1) == out.stride(-1) == 1:
        raise ValueError("scaled product: x, weight and out need unit stride in the last dimension")
    if x.scales.shape[1] not in (1, blocks) or (x.scales.shape[1] > 1 and weight.scales.shape[1] == 1):
        raise ValueError("scaled product: scales of x for blocks of 128 need scales of the weight for blocks of 128")


def is_exact(x: Scaled, weight: Scaled) -> bool:
    """Whether sums stay int32 to their end: int8, a scale a token and a row of W."""
    return weight.data.dtype == torch.int8 and x.scales.shape[1] == weight.scales.shape[1] == weight.rows == 1


def choose(rows: int, n: int, *, is_gated: bool = False, shared_bytes: int = hopper.SHARED_BYTES) -> Config:
    """The portable kernel's configuration, if a program may have so much shared memory: estimated, not measured."""
    if rows <= 16:
        config = Config(16, 32 if n <= 4096 else 64, 4, 5)
    elif rows <= 32:
        config = Config(32, 64, 4, 5)
    elif rows <= 64:
        config = Config(64, 64, 4, 4)
    else:
        config = Config(64, 128, 4, 4) if rows <= 256 else Config(128, 128, 8, 4)
    while _ring_bytes(config, is_gated) > shared_bytes:
        config = config._replace(block_n=config.block_n // 2)
    return config


def _ring_bytes(config: Config, is_gated: bool) -> int:
    """Bytes of the stages that Triton holds: one fewer than num_stages."""
    return (config.num_stages - 1) * BLOCK * (config.block_m + config.block_n * (2 if is_gated else 1))


@cached
def is_ours(rows: int, is_int8: bool, by_block: bool) -> bool:
    """Whether a kernel of ours is faster than cuBLAS for so many rows, by the tuning table."""
    tuning = current().scaled
    return rows <= (tuning.int8_rows if is_int8 else tuning.fp8_block_rows if by_block else tuning.fp8_rows)


def bucket(rows: int) -> int:
    """Numbers of rows that share one configuration of `scaled_wide`: to 64, to each multiple of 128, to 1,024, and beyond."""
    if rows <= MAX_BUCKET:
        return 64 if rows <= 64 else triton.cdiv(rows, 128) * 128
    return 2 * MAX_BUCKET if rows <= 2 * MAX_BUCKET else 16 * MAX_BUCKET


def kernel_specialization(rows: int) -> tuple[int, ...]:
    """A value that is equal for numbers of rows beyond 64 that run the same kernels of products with quantized weights."""
    tuning = current().scaled
    wide = (tuning.fp8_wide_rows, tuning.fp8_gated_wide_rows, tuning.fp8_block_wide_rows, tuning.int8_wide_rows)
    limits = (256, tuning.fp8_rows, tuning.fp8_block_rows, tuning.int8_rows, *wide)
    most = max(tuning.int4_rows, *wide)
    return *(rows <= limit for limit in limits), bucket(min(rows, most + 1))  # of scaled_wide, and of int4_wide


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
    """Run the portable kernel for any number of rows; out [M, N], gated [M, N / 2]. Raises ValueError as `check`."""
    check(x, weight, bias, out, is_gated)
    (rows, k), n = x.data.shape, out.shape[1]
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n, config.block_n))
    _scaled_kernel[grid](
        x.data, x.scales, weight.data, weight.scales, weight.scales if bias is None else bias, out,
        x.data.stride(0), weight.data.stride(0), out.stride(0), rows, n,
        k, x.scales.shape[1], weight.scales.shape[1], weight.rows, x.data.dtype == torch.int8,
        config.block_m, config.block_n, bias is not None, is_gated, pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl),
    )  # fmt: skip
