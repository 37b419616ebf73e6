"""4-bit experts for very few rows: a product for each (row, expert), on the plain cores, as in `pairs` for 16 bits.

    gate_up   h[t k + j] = act(x[t] @ gate_up[ids[t, j]]^T + b)        a program a pair and few of the I columns
    down      out[t] = Σ_j weights[t, j] (h[t k + j] @ down[ids[t, j]]^T + b')        a program a row and few of the H columns

A thread has four words of each of a program's rows of W, which thus share the work on x: two weights take a shift and three
masks. Products are summed over a word's pair, times its scale, in float32. For mxfp4 x is multiplied by 2^64: a code's bits as
they are mean code * 2^-126, and products would be too small for float32. Reference: `experts_reference.experts` on `unpack`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.experts_reference import Act
from quire.kernels.experts.four_bits_numbers import inputs, numbers, scale_and_offset, scale_of
from quire.kernels.experts.four_bits_tiles import operands, sizes
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights
from quire.kernels.experts.pairs import MAX_ROWS
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

LARGE, SMALL = tl.constexpr(2.0**64), tl.constexpr(2.0**-64)


class Pairs(NamedTuple):
    """Output columns of a program of each product, words of a row at a time, warps."""

    gate_up_n: int
    down_n: int
    block_words: int
    num_warps: int


PAIRS = Pairs(2, 4, 0, 0)


@triton.jit
def _words(w_row, start, inside, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Four words for each of BLOCK columns from `start` on, [BLOCK_N, BLOCK, 4]."""
    at = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = inside[:, None] & (at < WORDS)[None, :]
    words = tl.load(w_row[:, None] + at[None, :], mask, other=0, eviction_policy="evict_first")
    return words.reshape(inside.shape[0], BLOCK, 4)  # loaded flat: else the compiler would distribute W's rows over threads


@triton.jit
def _fours(s_ptr, at, block, total, mask, MX: tl.constexpr):
    """mxfp4's scales of the words' chunk, [BLOCK_N, BLOCK]; zeros for integers."""
    fours = tl.zeros(mask.shape, tl.int32)
    if MX:
        fours = tl.load(s_ptr + block[None, :] * total + at[:, None], mask, other=0)
    return fours


@triton.jit
def _added(
    acc, words, fours, low, high, s_ptr, z_ptr, at, k, total, mask,
    t: tl.constexpr, GROUP: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK] plus the products of stretch t, x's [BLOCK, 4]; k [BLOCK] is the stretch's first."""
    first, second = numbers(words, t, MX)
    part = tl.sum(first * low[None, :, :] + second * high[None, :, :], 2)
    if MX:
        scale = scale_of(fours, t)
    else:
        scale, offset = scale_and_offset(s_ptr, z_ptr, (k // GROUP)[None, :] * total + at[:, None], mask, ZEROS)
        part -= offset * tl.sum(low + high, 1)[None, :]
    return acc + part * scale


@triton.jit
def _x_pair(x_row, start, t: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, MX: tl.constexpr):
    """x for the columns' words and stretch t, [BLOCK, 4] of even and of odd k."""
    word = 4 * start + tl.arange(0, 4 * BLOCK)
    pair = word // 16 * 64 + 16 * t + word % 16
    low, high = inputs(x_row, pair, pair < K // 2)
    if MX:
        low, high = low * LARGE, high * LARGE
    return low.reshape(BLOCK, 4), high.reshape(BLOCK, 4)


@triton.jit
def _finished(acc, factor_ptr, bias_ptr, at, live, MX: tl.constexpr, BIAS: tl.constexpr):
    """Sums over all lanes [BLOCK_N], with the rows' factors and bias."""
    y = tl.sum(acc, 1)
    if MX:
        y = y * SMALL * tl.load(factor_ptr + at, live, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + at, live, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, ids_ptr, out_ptr, x_stride, N,
    K: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, CUBIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1).to(tl.int64)
    live = n < N
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x_row = x_ptr + (pair // TOP_K) * x_stride
    total = (2 if GATED else 1) * N  # an expert's rows of W
    w_row = w_ptr + (expert * total + n) * WORDS
    up_row = w_row + N.to(tl.int64) * WORDS
    at = expert * SCALES * total + n
    gate = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    up = gate
    for start in tl.static_range(0, WORDS // 4, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (columns < WORDS // 4)[None, :]
        block = columns // 4
        words, fours = _words(w_row, start, live, BLOCK, WORDS), _fours(s_ptr, at, block, total, mask, MX)
        if GATED:
            up_words, up_fours = _words(up_row, start, live, BLOCK, WORDS), _fours(s_ptr, at + N, block, total, mask, MX)
        for t in tl.static_range(4):
            low, high = _x_pair(x_row, start, t, BLOCK, K, MX)
            k = block * 128 + 32 * t
            gate = _added(gate, words, fours, low, high, s_ptr, z_ptr, at, k, total, mask, t, GROUP, MX, ZEROS)
            if GATED:
                up = _added(up, up_words, up_fours, low, high, s_ptr, z_ptr, at + N, k, total, mask, t, GROUP, MX, ZEROS)
    first = expert * total + n
    gate_sum = _finished(gate, factor_ptr, bias_ptr, first, live, MX, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        up_sum = _finished(up, factor_ptr, bias_ptr, first + N, live, MX, BIAS)
        h = swiglu(gate_sum, up_sum, dtype, LIMIT, ALPHA, OFFSET, CUBIC)
    else:
        h = ungated(gate_sum, dtype, ALPHA)
    tl.store(out_ptr + pair * N + n, h.to(dtype), live)


@triton.jit
def _down_kernel(
    h_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    live = n < N
    wait_for_previous(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_N], tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row * shared_stride + n, live, other=0.0).to(tl.float32)
    for j in range(TOP_K):  # not unrolled: the code would outgrow the cache
        pair = row * TOP_K + j
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        w_row = w_ptr + (expert * N + n) * WORDS
        at = expert * SCALES * N + n
        acc = tl.zeros([BLOCK_N, BLOCK], tl.float32)
        for start in tl.static_range(0, WORDS // 4, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = live[:, None] & (columns < WORDS // 4)[None, :]
            words, fours = _words(w_row, start, live, BLOCK, WORDS), _fours(s_ptr, at, columns // 4, N, mask, MX)
            for t in tl.static_range(4):
                low, high = _x_pair(h_ptr + pair * K, start, t, BLOCK, K, MX)
                k = columns // 4 * 128 + 32 * t
                acc = _added(acc, words, fours, low, high, s_ptr, z_ptr, at, k, N, mask, t, GROUP, MX, ZEROS)
        y = _finished(acc, factor_ptr, bias_ptr, expert * N + n, live, MX, BIAS)
        total += y.to(dtype).to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + row * N + n, total.to(dtype), live)


def cut(words: int) -> tuple[int, int]:
    """Words of a row at a time, and warps: 4 words a thread, and little of the last round beyond the row's end."""
    fitting = [block for block in (256, 128, 64, 32) if -(-words // block) * block <= 1.1 * words]
    block = max(fitting, default=min((256, 128, 64, 32), key=lambda block: -(-words // block) * block))
    return block, max(1, block // 128)


def _options(w: FourBits, config: Pairs, pdl: int) -> dict[str, Any]:
    block, warps = (config.block_words, config.num_warps) if config.block_words else cut(w.words.shape[2])
    return {
        "BLOCK": block // 4, "MX": w.is_mx, "ZEROS": w.zeros is not None, "PDL": pdl, "num_warps": warps, **launch_options(pdl),
    }  # fmt: skip


def gate_up(
    x: torch.Tensor, w: FourBitWeights, ids: torch.Tensor, act: Act, config: Pairs, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [T k, I] of x [T, H], 1 to 16 rows."""
    if len(x) > MAX_ROWS:
        raise ValueError(f"experts: {len(x)} rows are too many for a product a pair")
    if x.stride(0) % 2 or x.data_ptr() % 4:  # two numbers are read as one
        x = x.contiguous()
    is_gated, limit, alpha, offset, cubic = constants(act)
    inner, bias = w.down.inputs, w.gate_up_bias
    h = x.new_empty(ids.numel(), inner)
    _gate_up_kernel[(triton.cdiv(inner, config.gate_up_n), ids.numel())](
        x, *operands(w.gate_up), x if bias is None else bias, ids, h, x.stride(0), inner, *sizes(w.gate_up), ids.shape[1],
        config.gate_up_n, BIAS=bias is not None, GATED=is_gated, LIMIT=limit, ALPHA=alpha, OFFSET=offset, CUBIC=cubic,
        **_options(w.gate_up, config, pdl),
    )  # fmt: skip
    return h


def experts(
    x: torch.Tensor,
    w: FourBitWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: Pairs,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], 1 to 16 rows, with experts ids [T, k]; arguments as checked by `experts.experts`."""
    (rows, hidden), bias = x.shape, w.down_bias
    h, out = gate_up(x, w, ids, act, config, pdl=pdl), x.new_empty(rows, hidden)
    _down_kernel[(triton.cdiv(hidden, config.down_n), rows)](
        h, *operands(w.down), x if bias is None else bias, x if shared is None else shared, ids, weights, out,
        0 if shared is None else shared.stride(0), hidden, *sizes(w.down), ids.shape[1], config.down_n, BIAS=bias is not None,
        SHARED=shared is not None, **_options(w.down, config, pdl),
    )  # fmt: skip
    return out
