"""4-bit experts in tiles of one expert's rows (`align`), as in `tiles` for 16 bits: any GPU, any number of rows.

    gate_up   h[p] = act(x[row of p] @ gate_up[e]^T + b)       p: place in the order of `align`; without a gate, up's rows alone
    down      y[pair of p] = weights[pair] (h[p] @ down[e]^T + b')

Then `tiles.add_up`. W's numbers are computed in registers, rounded to x's type and passed to the tensor cores through shared
memory, so no wgmma reads a computed register (which ptxas may reuse too early). x bfloat16 or float16; float32: exact products.
Reference: `experts_reference.experts` on `four_bits_weight.unpack`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts import tiles
from quire.kernels.experts.align import Alignment, align
from quire.kernels.experts.experts_reference import Act
from quire.kernels.experts.four_bits_numbers import codes, less, numbers, scale_and_offset, scale_of, times
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

_place = tiles.place
BAND = tiles.BAND


class Tiles(NamedTuple):
    """Tile sizes: rows; output columns (gate and up each; down); warps; pipeline stages."""

    rows: int
    gate_up_n: int
    down_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _pair(words, s_ptr, z_ptr, at, four, first, total, live, t: tl.constexpr, GROUP: tl.constexpr, MX: tl.constexpr,
          ZEROS: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Stretch t of a chunk as dtype, [BLOCK_N, 16, 2]; first: the chunk's first k."""
    if dtype == tl.bfloat16 and (MX or s_ptr.dtype.element_ty == tl.bfloat16):
        if MX:
            pairs = times(codes(words, t), (((four >> (8 * t)) & 0xFF) * 0x00800080)[:, None])
        else:
            group = (first + 32 * t) // GROUP * total + at
            zero = tl.full([words.shape[0]], 8, tl.int32)
            if ZEROS:
                zero = tl.load(z_ptr + group, live, other=0).to(tl.int32)
            scale = tl.load(s_ptr + group, live, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            numbers_and_128 = ((words >> (4 * t)) & 0x000F000F) | 0x43004300
            pairs = times(less(numbers_and_128, (zero * 0x10001 | 0x43004300)[:, None]), (scale * 0x10001)[:, None])
        low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        return tl.join(low, (pairs >> 16).to(tl.int16).to(dtype, bitcast=True))
    low, high = numbers(words, t, MX)
    if MX:
        scale = scale_of(four, t)
    else:
        scale, offset = scale_and_offset(s_ptr, z_ptr, (first + 32 * t) // GROUP * total + at, live, ZEROS)
        low, high = low - offset[:, None], high - offset[:, None]
    return tl.join((low * scale[:, None]).to(dtype), (high * scale[:, None]).to(dtype))


@triton.jit
def _block(
    w_row, s_ptr, z_ptr, at, block, total, live,
    GROUP: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A chunk of 128 of K of W's rows, [128, BLOCK_N]; w_row points to rows' words [BLOCK_N, 16], `at` to their scales."""
    words = tl.load(w_row + block * 16, live[:, None], other=0, eviction_policy="evict_first")
    four = tl.zeros([words.shape[0]], tl.int32)
    if MX:
        four = tl.load(s_ptr + block * total + at, live, other=0)
    k = block * 128
    first = _pair(words, s_ptr, z_ptr, at, four, k, total, live, 0, GROUP, MX, ZEROS, dtype)
    second = _pair(words, s_ptr, z_ptr, at, four, k, total, live, 1, GROUP, MX, ZEROS, dtype)
    third = _pair(words, s_ptr, z_ptr, at, four, k, total, live, 2, GROUP, MX, ZEROS, dtype)
    fourth = _pair(words, s_ptr, z_ptr, at, four, k, total, live, 3, GROUP, MX, ZEROS, dtype)
    both = tl.join(tl.join(first, third), tl.join(second, fourth))  # [BLOCK_N, j, h, t // 2, t % 2]
    return both.permute(0, 3, 4, 1, 2).reshape(words.shape[0], 128).trans(1, 0)


@triton.jit
def _finished(acc, factor_ptr, bias_ptr, at, live, MX: tl.constexpr, BIAS: tl.constexpr):
    """Sums [BLOCK_M, BLOCK_N], with the columns' factors and bias."""
    if MX:
        acc *= tl.load(factor_ptr + at, live, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + at, live, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["slots"])
def _gate_up_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_stride, slots, N,
    K: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    CUBIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, column = _place(slots, tl.cdiv(N, BLOCK_N), BAND)
    wait_for_previous(PDL)
    size = tl.load(tiles_ptr + 2 * slots + slot)
    if size <= 0:
        return
    expert = tl.load(tiles_ptr + slot).to(tl.int64)
    begin = tl.load(tiles_ptr + slots + slot).to(tl.int64)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, 128)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < N
    rows = tl.load(order_ptr + begin + m, m < size, other=0) // TOP_K  # rows beyond the tile are another's, and not stored
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = (2 if GATED else 1) * N  # an expert's rows of W
    w_row = w_ptr + (expert * total + n)[:, None] * WORDS + tl.arange(0, 16)[None, :]
    up_row = w_row + N.to(tl.int64) * WORDS
    at = expert * SCALES * total + n
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = gate
    for block in range(WORDS // 16):
        x = tl.load(x_at + block * 128, (k < K - block * 128)[None, :], other=0.0)
        w = _block(w_row, s_ptr, z_ptr, at, block, total, live, GROUP, MX, ZEROS, x.dtype)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        if GATED:
            w = _block(up_row, s_ptr, z_ptr, at + N, block, total, live, GROUP, MX, ZEROS, x.dtype)
            up = tl.dot(x, w, up, input_precision="ieee")
    first = expert * total + n
    gate = _finished(gate, factor_ptr, bias_ptr, first, live, MX, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        up = _finished(up, factor_ptr, bias_ptr, first + N, live, MX, BIAS)
        h = swiglu(gate, up, dtype, LIMIT, ALPHA, OFFSET, CUBIC).to(dtype)
    else:
        h = ungated(gate, dtype, ALPHA).to(dtype)
    tl.store(out_ptr + (begin + m)[:, None] * N + n[None, :], h, (m < size)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["slots"])
def _down_kernel(
    h_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, weights_ptr, out_ptr, order_ptr, tiles_ptr, slots, N,
    K: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr, MX: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, column = _place(slots, tl.cdiv(N, BLOCK_N), BAND)
    wait_for_previous(PDL)
    size = tl.load(tiles_ptr + 2 * slots + slot)
    if size <= 0:
        return
    expert = tl.load(tiles_ptr + slot).to(tl.int64)
    begin = tl.load(tiles_ptr + slots + slot).to(tl.int64)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, 128)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < N
    h_at = h_ptr + (begin + tl.where(m < size, m, 0))[:, None] * K + k[None, :]
    w_row = w_ptr + (expert * N + n)[:, None] * WORDS + tl.arange(0, 16)[None, :]
    at = expert * SCALES * N + n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(WORDS // 16):
        h = tl.load(h_at + block * 128, (k < K - block * 128)[None, :], other=0.0)
        acc = tl.dot(h, _block(w_row, s_ptr, z_ptr, at, block, N, live, GROUP, MX, ZEROS, h.dtype), acc, input_precision="ieee")
    acc = _finished(acc, factor_ptr, bias_ptr, expert * N + n, live, MX, BIAS)
    pairs = tl.load(order_ptr + begin + m, m < size, other=0)
    y = acc * tl.load(weights_ptr + pairs, m < size, other=0.0)[:, None]
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), (m < size)[:, None] & live[None, :])


def operands(w: FourBits) -> tuple[torch.Tensor, ...]:
    """Words, scales, zeros and factors; the scales stand in for missing ones, which are not read."""
    return w.words, w.scales, w.scales if w.zeros is None else w.zeros, w.scales if w.factors is None else w.factors


def sizes(w: FourBits) -> tuple[int, int, int, int]:
    """K, words of a row, scales of a row (mxfp4: int32 of four), group."""
    return w.inputs, w.words.shape[2], w.scales.shape[1], w.group


def _options(w: FourBits, config: Tiles, block_n: int, pdl: int) -> tuple[int, dict[str, Any]]:
    """Columns of a tile, and keyword arguments of both kernels."""
    n = min(block_n, max(16, triton.next_power_of_2(w.words.shape[1])))
    options = {
        "BLOCK_M": config.rows, "BLOCK_N": n, "BAND": BAND, "MX": w.is_mx, "ZEROS": w.zeros is not None, "PDL": pdl,
        "num_warps": config.num_warps, "num_stages": config.num_stages, **launch_options(pdl),
    }  # fmt: skip
    return n, options


def gate_up(
    x: torch.Tensor, w: FourBitWeights, act: Act, at: Alignment, top_k: int, config: Tiles, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [P, I] in the order of `at`, of x [T, H]."""
    is_gated, limit, alpha, offset, cubic = constants(act)
    inner, bias = w.down.inputs, w.gate_up_bias
    h = x.new_empty(len(at.order), inner)
    n, options = _options(w.gate_up, config, config.gate_up_n, pdl)
    _gate_up_kernel[(at.num_slots * triton.cdiv(inner, n),)](
        x, *operands(w.gate_up), x if bias is None else bias, h, at.order, at.tiles, x.stride(0), at.num_slots, inner,
        *sizes(w.gate_up), top_k, BIAS=bias is not None, GATED=is_gated, LIMIT=limit, ALPHA=alpha, OFFSET=offset, CUBIC=cubic,
        **options,
    )  # fmt: skip
    return h


def down(
    h: torch.Tensor, w: FourBitWeights, weights: torch.Tensor, at: Alignment, config: Tiles, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [P, H] by pairs, of h [P, I] in the order of `at`."""
    hidden, bias = w.down.words.shape[1], w.down_bias
    y = h.new_empty(len(at.order), hidden)
    n, options = _options(w.down, config, config.down_n, pdl)
    _down_kernel[(at.num_slots * triton.cdiv(hidden, n),)](
        h, *operands(w.down), h if bias is None else bias, weights, y, at.order, at.tiles, at.num_slots, hidden,
        *sizes(w.down), BIAS=bias is not None, **options,
    )  # fmt: skip
    return y


def experts(
    x: torch.Tensor,
    w: FourBitWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: Tiles,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; arguments as checked by `experts.experts`."""
    top_k = ids.shape[1]
    at = align(ids, len(w.gate_up.words), config.rows, pdl=pdl)
    h = gate_up(x, w, act, at, top_k, config, pdl=pdl)
    return tiles.add_up(down(h, w, weights, at, config, pdl=pdl), ids, shared, pdl=pdl)
