"""8-bit experts for any number of rows. Each tile has rows of one expert (`align`), as in `tiles` for 16 bits.

    gate_up   h[p] = act(x[row of p] @ gate_up[e]^T + b)       p: place in the order of `align`; without a gate, up's rows alone
    down      y[pair of p] = weights[pair] (h[p] @ down[e]^T + b')

x and h are 8 bits with a scale per token or per 128 of its values (`linear/quantize`); weights: see `scaled_weight`. The sum of
each 128 of K is converted to float32 and scaled, since Hopper accumulates fp8 products in few bits. Only int8 with one scale
per row and token is summed in int32 to the end. No wgmma has computed values as operands. Reference: `dequantized` operands.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts import tiles
from quire.kernels.experts.align import Alignment
from quire.kernels.experts.experts_reference import Act
from quire.kernels.experts.scaled_weight import ScaledExperts, ScaledWeights
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

_place = tiles.place


class Tiles(NamedTuple):
    """Tile sizes: rows; output columns (gate and up each; down); warps; pipeline stages."""

    rows: int
    gate_up_n: int
    down_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _added(acc, x, w_at, s_ptr, at, xs, block, total, k_left, live, INT: tl.constexpr, BLOCKS: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] plus the products of 128 of K."""
    w = tl.load(w_at + block * 128, k_left[:, None] & live[None, :], other=0.0, eviction_policy="evict_first")
    if INT and BLOCKS == 1:
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    else:
        part = tl.dot(x, w, out_dtype=tl.int32 if INT else tl.float32).to(tl.float32)
        scale = xs[:, None]  # here, not at the end: the compiler would merge a plain `acc += part` into the product
        if BLOCKS > 1:
            scale = scale * tl.load(s_ptr + block * total + at, live, other=0.0)[None, :]
        acc += part * scale
    return acc


@triton.jit
def _finished(acc, s_ptr, at, bias_ptr, bias_at, xs, live, INT: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr):
    if BLOCKS == 1:
        if INT:
            acc = acc.to(tl.float32) * xs[:, None]
        acc *= tl.load(s_ptr + at, live, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + bias_at, live, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["slots"])
def _gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, slots, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BAND: tl.constexpr, INT: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, CUBIC: tl.constexpr, PDL: tl.constexpr,
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
    rows = (tl.load(order_ptr + begin + m, m < size, other=0) // TOP_K).to(tl.int64)
    x_at = x_ptr + rows[:, None] * K + k[None, :]
    total = (2 if GATED else 1) * N  # an expert's rows of W
    first = expert * total + n
    w_at = w_ptr + first[None, :] * K + k[:, None]
    up_at = w_at + N.to(tl.int64) * K
    at = expert * BLOCKS * total + n
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT and BLOCKS == 1 else tl.float32)
    up = gate
    xs = tl.load(xs_ptr + rows * X_BLOCKS)
    for block in range((K + 127) // 128):
        if X_BLOCKS > 1:
            xs = tl.load(xs_ptr + rows * X_BLOCKS + block)
        left = k < K - block * 128
        x = tl.load(x_at + block * 128, left[None, :], other=0.0)
        gate = _added(gate, x, w_at, s_ptr, at, xs, block, total, left, live, INT, BLOCKS)
        if GATED:
            up = _added(up, x, up_at, s_ptr, at + N, xs, block, total, left, live, INT, BLOCKS)
    gate_y = _finished(gate, s_ptr, at, bias_ptr, first, xs, live, INT, BLOCKS, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        up_y = _finished(up, s_ptr, at + N, bias_ptr, first + N, xs, live, INT, BLOCKS, BIAS)
        h = swiglu(gate_y, up_y, dtype, LIMIT, ALPHA, OFFSET, CUBIC).to(dtype)
    else:
        h = ungated(gate_y, dtype, ALPHA).to(dtype)
    tl.store(out_ptr + (begin + m)[:, None] * N + n[None, :], h, (m < size)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["slots"])
def _down_kernel(
    h_ptr, hs_ptr, w_ptr, s_ptr, bias_ptr, weights_ptr, out_ptr, order_ptr, tiles_ptr, slots, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BAND: tl.constexpr, INT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
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
    rows = begin + tl.where(m < size, m, 0)
    h_at = h_ptr + rows[:, None] * K + k[None, :]
    w_at = w_ptr + (expert * N + n)[None, :] * K + k[:, None]
    at = expert * BLOCKS * N + n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT and BLOCKS == 1 else tl.float32)
    hs = tl.load(hs_ptr + rows * X_BLOCKS)
    for block in range((K + 127) // 128):
        if X_BLOCKS > 1:
            hs = tl.load(hs_ptr + rows * X_BLOCKS + block)
        left = k < K - block * 128
        h = tl.load(h_at + block * 128, left[None, :], other=0.0)
        acc = _added(acc, h, w_at, s_ptr, at, hs, block, N, left, live, INT, BLOCKS)
    y = _finished(acc, s_ptr, at, bias_ptr, expert * N + n, hs, live, INT, BLOCKS, BIAS)
    pairs = tl.load(order_ptr + begin + m, m < size, other=0)
    y *= tl.load(weights_ptr + pairs, m < size, other=0.0)[:, None]
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), (m < size)[:, None] & live[None, :])


def _options(w: ScaledExperts, x: Scaled, config: Tiles, block_n: int, pdl: int) -> tuple[int, dict[str, Any]]:
    """Columns of a tile, and keyword arguments of both kernels."""
    n = min(block_n, max(16, triton.next_power_of_2(w.data.shape[1])))
    options = {
        "K": w.data.shape[2], "X_BLOCKS": x.scales.shape[1], "BLOCKS": w.scales.shape[1], "BLOCK_M": config.rows, "BLOCK_N": n,
        "BAND": tiles.BAND, "INT": w.data.dtype == torch.int8, "PDL": pdl, "num_warps": config.num_warps,
        "num_stages": config.num_stages, **launch_options(pdl),
    }  # fmt: skip
    return n, options


def gate_up(
    x: Scaled, w: ScaledWeights, act: Act, at: Alignment, top_k: int, config: Tiles, dtype: torch.dtype, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [P, I], in dtype and in the order of `at`, from x [T, H]."""
    is_gated, limit, alpha, offset, cubic = constants(act)
    inner, bias = w.down.data.shape[2], w.gate_up_bias
    h = torch.empty(len(at.order), inner, dtype=dtype, device=x.data.device)
    n, options = _options(w.gate_up, x, config, config.gate_up_n, pdl)
    _gate_up_kernel[(at.num_slots * triton.cdiv(inner, n),)](
        x.data, x.scales, w.gate_up.data, w.gate_up.scales, h if bias is None else bias, h, at.order, at.tiles, at.num_slots,
        inner, TOP_K=top_k, BIAS=bias is not None, GATED=is_gated, LIMIT=limit, ALPHA=alpha, OFFSET=offset, CUBIC=cubic,
        **options,
    )  # fmt: skip
    return h


def down(
    h: Scaled, w: ScaledWeights, weights: torch.Tensor, at: Alignment, config: Tiles, dtype: torch.dtype, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [P, H], in dtype and in the order of the pairs, from h [P, I] in the order of `at`."""
    hidden, bias = w.down.data.shape[1], w.down_bias
    y = torch.empty(len(at.order), hidden, dtype=dtype, device=h.data.device)
    n, options = _options(w.down, h, config, config.down_n, pdl)
    _down_kernel[(at.num_slots * triton.cdiv(hidden, n),)](
        h.data, h.scales, w.down.data, w.down.scales, y if bias is None else bias, weights, y, at.order, at.tiles, at.num_slots,
        hidden, BIAS=bias is not None, **options,
    )  # fmt: skip
    return y
