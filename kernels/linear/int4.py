"""Products of 4-bit weights with 16-bit activations: kernels for few rows, cuBLAS on the dequantized weight for many.

    y = x @ W^T + bias        gated: y = silu(g) * u of g | u = x @ W^T + bias        W as in `int4_weight`

x [M, K], y [M, N], bfloat16 or float16 (float32 in tests); sums in float32, rounded where `linear` rounds. W moves once. Scales
multiply float32 sums over a group, so W's numbers are never rounded: q - z are integers.

One row: the plain cores. At the memory's full rate an SM has 3.3 issue slots a weight; a conversion alone would take four of
them. Here a mask turns bits into 128 + q, and the sum of x over the group subtracts the excess: one shift for two weights, a
mask and a product each. 2 to 64 rows: tensor cores, with x as first operand and W as second. wgmma reads its second operand
from shared memory only and mma is synchronous, so W's numbers are in no register that an asynchronous wgmma reads (which ptxas
before CUDA 13.3 may reuse too early; tests/kernels/test_wgmma_operands.py). Reference: `int4_weight.unpack`. A Hopper has
kernels of its own: for one row of a large W (`int4_row`), for 2 to 64 rows, and one that is gated or split (`int4_hopper`), and
for hundreds of rows (`int4_wide`), in which W's numbers are such registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated, silu_mul
from quire.kernels.linear.blas import blas_linear
from quire.kernels.linear.int4_weight import BLOCK_WORDS, Int4Weight
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.triton_support.hopper import block_rows
from quire.kernels.tuning.current import linear_tuning

MAX_ROWS = 64
BITS_OF_128 = 0x43000000  # in float32


class Config(NamedTuple):
    block_n: int  # output columns of a program
    block_words: int  # of a row at a time, one row's kernel; the other takes a chunk of 128 weights
    num_warps: int
    num_stages: int = 1


@triton.jit
def _with_128(bits, magic):
    """128 + q as float32, of q at bits 16 to 19; magic is the bits of 128, in a register: so this is one `lop3`, else two."""
    return ((bits & 0x000F0000) | magic).to(tl.float32, bitcast=True)


@triton.jit
def _pair(x_ptr, pair, K: tl.constexpr):
    """x[2 pair] and x[2 pair + 1] in float32."""
    if x_ptr.dtype.element_ty == tl.bfloat16:
        both = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pair, pair < K // 2, other=0)
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    else:
        low = tl.load(x_ptr + 2 * pair, pair < K // 2, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + 2 * pair + 1, pair < K // 2, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _normed(x_ptr, residual_ptr, sum_ptr, eps, K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """1 / rms of the row residual + x; the first program also writes that row."""
    k = tl.arange(0, BLOCK)
    total = tl.load(residual_ptr + k, k < K, other=0.0)
    if ADD:
        x = tl.load(x_ptr + k, k < K, other=0.0)
        total = (total.to(tl.float32) + x.to(tl.float32)).to(total.dtype)
        if tl.program_id(0) == 0:
            tl.store(sum_ptr + k, total, k < K)
    wide = total.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)


@triton.jit
def _input_pair(x_ptr, residual_ptr, norm_ptr, rms, pair, K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr):
    """Two adjacent elements of x, or of the norm of residual + x, rounded as if stored; rms is from `_normed`."""
    low, high = _pair(x_ptr, pair, K)
    if NORM:
        dtype: tl.constexpr = residual_ptr.dtype.element_ty
        first, second = _pair(residual_ptr, pair, K)
        if ADD:
            first, second = (first + low).to(dtype).to(tl.float32), (second + high).to(dtype).to(tl.float32)
        low_norm, high_norm = _pair(norm_ptr, pair, K)
        low = ((first * rms).to(dtype).to(tl.float32) * low_norm).to(dtype).to(tl.float32)
        high = ((second * rms).to(dtype).to(tl.float32) * high_norm).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _add_group(acc, part, x_sum, s_ptr, z_ptr, at, mask, ZEROS: tl.constexpr):
    """acc + s * (part - (128 + z) * x_sum)."""
    scale = tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
    if ZEROS:
        zero = tl.load(z_ptr + at, mask, other=0).to(tl.int32)
        offset = ((zero << 16) | 0x43000000).to(tl.float32, bitcast=True)
        return acc + scale * (part - offset * x_sum[None, :])
    return acc + scale * (part - 136.0 * x_sum[None, :])


@triton.jit
def _add_words(
    acc, words, x_ptr, residual_ptr, norm_ptr, rms, s_ptr, z_ptr, n, total, columns, mask, magic,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_WORDS] plus the products of these words, at `columns` of W's words; total: number of W's rows."""
    block = columns // 16
    part = tl.zeros_like(acc)
    x_sum = tl.zeros([words.shape[1]], tl.float32)
    for t in tl.static_range(4):
        low, high = _input_pair(x_ptr, residual_ptr, norm_ptr, rms, block * 64 + 16 * t + columns % 16, K, NORM, ADD)
        bits = words >> (4 * t)
        part += _with_128(bits << 16, magic) * low[None, :]
        part += _with_128(bits, magic) * high[None, :]
        x_sum += low + high
        if (32 * t + 32) % GROUP == 0 or t == 3:
            at = ((block * 128 + 32 * t) // GROUP)[None, :] * total + n[:, None]
            acc = _add_group(acc, part, x_sum, s_ptr, z_ptr, at, mask, ZEROS)
            part = tl.zeros_like(acc)
            x_sum = tl.zeros_like(x_sum)
    return acc


@triton.jit(do_not_specialize=["magic"])
def one_row_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, residual_ptr, norm_ptr, sum_ptr, eps, N, magic,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    NORM: tl.constexpr = 0, ADD: tl.constexpr = False,
):  # fmt: skip
    """NORM: elements of a norm's row, up to a power of two; 0: no norm."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = N * 2 if GATED else N
    columns = tl.arange(0, BLOCK)
    row = w_ptr + n.to(tl.int64)[:, None] * WORDS
    up_row = row + N.to(tl.int64) * WORDS
    mask = (n < N)[:, None] & (columns < WORDS)[None, :]
    words = tl.load(row + columns[None, :], mask, other=0, eviction_policy="evict_first")
    up_words = words
    if GATED:
        up_words = tl.load(up_row + columns[None, :], mask, other=0, eviction_policy="evict_first")
    wait_for_previous(2 if PDL > 0 else 0)  # many small programs, always: EARLY
    rms = 1.0
    if NORM > 0:
        rms = _normed(x_ptr, residual_ptr, sum_ptr, eps, K, NORM, ADD)
    acc = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    up = acc
    for start in tl.static_range(0, WORDS, BLOCK):
        at = start + columns
        if start > 0:
            mask = (n < N)[:, None] & (at < WORDS)[None, :]
            words = tl.load(row + at[None, :], mask, other=0, eviction_policy="evict_first")
            if GATED:
                up_words = tl.load(up_row + at[None, :], mask, other=0, eviction_policy="evict_first")
        acc = _add_words(
            acc, words, x_ptr, residual_ptr, norm_ptr, rms, s_ptr, z_ptr, n, total, at, mask, magic,
            K, GROUP, ZEROS, NORM > 0, ADD,
        )  # fmt: skip
        if GATED:
            up = _add_words(
                up, up_words, x_ptr, residual_ptr, norm_ptr, rms, s_ptr, z_ptr, n + N, total, at, mask, magic,
                K, GROUP, ZEROS, NORM > 0, ADD,
            )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
    if GATED:
        u = tl.sum(up, 1)
        if BIAS:
            u += tl.load(bias_ptr + N + n, n < N, other=0.0).to(tl.float32)
        y = gated(y, u, dtype)
    tl.store(out_ptr + n, y.to(dtype), n < N)


@triton.jit
def _numbers(words, zero, t: tl.constexpr, dtype: tl.constexpr):
    """q - z of stretch t of a chunk [BLOCK_N, 32], exactly; zero [BLOCK_N, 1] is z as dtype."""
    bits = words >> (4 * t)
    if dtype == tl.bfloat16:
        low = ((bits & 0xF) | 0x4300).to(tl.int16).to(dtype, bitcast=True)
        high = (((bits >> 16) & 0xF) | 0x4300).to(tl.int16).to(dtype, bitcast=True)
        offset = zero + 128.0
    elif dtype == tl.float16:
        low = ((bits & 0xF) | 0x6400).to(tl.int16).to(dtype, bitcast=True)
        high = (((bits >> 16) & 0xF) | 0x6400).to(tl.int16).to(dtype, bitcast=True)
        offset = zero + 1024.0
    else:
        low, high, offset = _with_128(bits << 16, 0x43000000), _with_128(bits, 0x43000000), zero + 128.0
    offset = offset.to(dtype)
    both = tl.join(low - offset, high - offset)
    return both.reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def _add_block(
    acc, words, x_ptr, x_mask, s_ptr, z_ptr, n, total, live, block,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] plus the products of a chunk of 128 of K; x_ptr [BLOCK_M, 1] points to rows of x."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    within = tl.arange(0, 32)
    part = tl.zeros_like(acc)
    for t in tl.static_range(4):
        k = block * 128 + 32 * t
        at = k // GROUP * total + n
        zero = tl.full([words.shape[0], 1], 8.0, tl.float32)
        if ZEROS:
            zero = tl.load(z_ptr + at, live, other=0).to(tl.float32)[:, None]
        x = tl.load(x_ptr + (k + within)[None, :], x_mask & (k + within < K)[None, :], other=0.0)
        part = tl.dot(x, _numbers(words, zero, t, dtype).trans(1, 0), part, input_precision="ieee")
        if (32 * t + 32) % GROUP == 0 or t == 3:
            acc += part * tl.load(s_ptr + at, live, other=0.0).to(tl.float32)[None, :]
            part = tl.zeros_like(acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, x_stride, out_stride, M, N,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, 16)
    live = n < N
    total = N * 2 if GATED else N
    row = w_ptr + n.to(tl.int64)[:, None] * WORDS + columns[None, :]
    up_row = row + N.to(tl.int64) * WORDS
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride
    x_mask = (m < M)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    wait_for_previous(PDL)
    for block in range(WORDS // 16):
        words = tl.load(row + block * 16, live[:, None], other=0, eviction_policy="evict_first")
        acc = _add_block(acc, words, x_row, x_mask, s_ptr, z_ptr, n, total, live, block, K, GROUP, ZEROS)
        if GATED:
            words = tl.load(up_row + block * 16, live[:, None], other=0, eviction_policy="evict_first")
            up = _add_block(up, words, x_row, x_mask, s_ptr, z_ptr, n + N, total, live, block, K, GROUP, ZEROS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, live, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up, dtype)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :], acc.to(dtype), x_mask & live[None, :])


@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, z_ptr, out_ptr, N, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (n < N) & (columns < WORDS)
    words = tl.load(w_ptr + n * WORDS + columns, mask, other=0, eviction_policy="evict_first")
    half = tl.arange(0, 2)[None, None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for t in tl.static_range(4):
        first = columns // 16 * 128 + 32 * t
        at = first // GROUP * N + n
        scale = tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
        offset = tl.full([BLOCK_N, BLOCK], 136.0, tl.float32)
        if ZEROS:
            offset = tl.load(z_ptr + at, mask, other=0).to(tl.float32) + 128.0
        bits = words >> (4 * t)
        low = (_with_128(bits << 16, 0x43000000) - offset) * scale
        high = (_with_128(bits, 0x43000000) - offset) * scale
        k = (first + columns % 16 * 2)[:, :, None] + half
        tl.store(out_ptr + n[:, :, None] * K + k, tl.join(low, high).to(dtype), mask[:, :, None] & (k < K))


def dequantize(weight: Int4Weight, out: torch.Tensor) -> torch.Tensor:
    """W in out's dtype, into `out` [N, K]: as `int4_weight.unpack`, in one pass over both."""
    (n, words), k = weight.words.shape, weight.inputs
    if out.shape != (n, k) or not out.is_contiguous():
        raise ValueError(f"int4: a weight [{n}, {k}] does not go to {tuple(out.shape)}")
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _dequantize_kernel[(triton.cdiv(n, 4), triton.cdiv(words, 64))](
        weight.words, weight.scales, zeros, out, n, k, words, weight.group, 4, 64,
        weight.zeros is not None, num_warps=4,
    )  # fmt: skip
    return out


def choose(rows: int, n: int, words: int) -> Config:
    """The configuration for n output columns and so many words a row: estimated, not measured."""
    if rows == 1:  # 4 rows of W share the work on x: 4.9 instructions a weight at K = 4096; with 2 rows 6.5, with 8 4.5
        block = min(max(triton.next_power_of_2(words), BLOCK_WORDS), 256)
        return Config(4 if n > 1024 else 2, block, 2)
    return Config(32 if n <= 4096 else 64, BLOCK_WORDS, 4, 5)


def launch(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel for 1 to 64 rows, columns of x in the weight's order; gated: out [M, N / 2].

    Raises ValueError if shapes or types do not fit.
    """
    (rows, k), columns = x.shape, weight.outputs
    n = columns // 2 if is_gated else columns
    if k != weight.inputs or out.shape != (rows, n) or not 1 <= rows <= MAX_ROWS or (is_gated and columns % 2):
        raise ValueError(
            f"int4: x {x.shape}, weight [{columns}, {weight.inputs}], out {out.shape} do not fit, or too many rows"
        )
    if x.dtype != out.dtype or x.stride(1) != 1 or out.stride(1) != 1 or (bias is not None and bias.shape != (columns,)):
        raise ValueError("int4: x and out need one dtype and unit stride in the last dimension, a bias an element an output")
    if x.stride(0) % 2 or x.data_ptr() % 4:
        raise ValueError("int4: rows of x must begin at multiples of 4 bytes")
    zeros = weight.scales if weight.zeros is None else weight.zeros
    arguments = (x, weight.words, weight.scales, zeros, x if bias is None else bias, out)
    shape = (k, weight.words.shape[1], weight.group, config.block_n)
    flags = (weight.zeros is not None, bias is not None, is_gated, pdl)
    grid = (triton.cdiv(n, config.block_n),)
    options = {"num_warps": config.num_warps, **launch_options(pdl)}
    if rows == 1:
        one_row_kernel[grid](*arguments, x, x, x, 0.0, n, BITS_OF_128, *shape, config.block_words, *flags, **options)
    else:
        options["num_stages"] = config.num_stages
        _dot_kernel[grid](*arguments, x.stride(0), out.stride(0), rows, n, *shape, block_rows(rows), *flags, **options)


def int4_linear_split_k(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, *, pdl: int = PLAIN
) -> torch.Tensor:
    """As `int4_linear`, or float32 partial sums [S, M, N] for a norm to add up, if one product has too few tiles for the GPU.

    One row of a small W is not split: the next norm may be one kernel with the next product (`int4_norm`).
    """
    is_little = len(x) == 1 and weight.outputs * weight.inputs <= linear_tuning().norm_linear_weight
    if hopper.available(x.device) and not is_little:
        from quire.kernels.linear import int4_hopper, int4_row, int4_wide

        if int4_row.supports(x, weight):
            return int4_row.linear_split_k(x, weight, bias, pdl=pdl)
        if int4_wide.supports(x, weight):
            if int4_wide.num_splits(x, weight) > 1:
                return int4_wide.linear_split_k(x, weight, bias, pdl=pdl)
        elif int4_hopper.supports(x, weight) and int4_hopper.num_splits(x, weight) > 1:
            return int4_hopper.linear_split_k(x, weight, bias, pdl=pdl)
    return int4_linear(x, weight, bias, pdl=pdl)


def int4_linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ W^T + bias, gated if is_gated, columns of x in the weight's order; in `out` if given.

    On a Hopper by `int4_hopper` and, up to the tuning table's limit of rows, `int4_wide`. More rows than that, or on other GPUs
    than 64, go to cuBLAS with W dequantized into scratch: 2 N K bytes while it runs.
    """
    n = weight.outputs // 2 if is_gated else weight.outputs
    if not len(x):
        return x.new_empty((0, n)) if out is None else out
    if hopper.available(x.device):
        from quire.kernels.linear import int4_hopper, int4_row, int4_wide  # import Gluon, which other GPUs' Triton may not have

        if int4_row.supports(x, weight):
            return int4_row.linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
        if int4_wide.supports(x, weight):
            return int4_wide.linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
        # the 8B's qkv_proj, for one row: 9.6 us by the ring, which is not split here, 7.6 on the plain cores
        if int4_hopper.supports(x, weight) and (len(x) > 1 or is_gated):
            return int4_hopper.linear(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
    if len(x) > MAX_ROWS:
        dense = dequantize(weight, x.new_empty(weight.outputs, weight.inputs))
        return silu_mul(blas_linear(x, dense, bias), out, pdl=pdl) if is_gated else blas_linear(x, dense, bias, out)
    out = x.new_empty((len(x), n)) if out is None else out
    launch(x, weight, bias, out, choose(len(x), n, weight.words.shape[1]), is_gated=is_gated, pdl=pdl)
    return out
