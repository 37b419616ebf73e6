"""Experts for any number of rows: tiles of one expert's rows (`align`) times its weights, on tensor cores, in three launches.

    gate_up   h[p] = act(x[row of p] @ gate_up[e]^T + b)       p: place in the order of `align`, rows gathered on the way
    down      y[pair of p] = weights[pair] (h[p] @ down[e]^T + b')
    add_up    out[t] = Σ_j y[t, j], in float32 and in order, `shared` [T, H] first

bfloat16 or float16 (float32: exact products, one configuration for all numbers of rows, so that a row in a batch equals the row
alone), sums in float32, h and y rounded. An empty slot's programs end at once. With expert parallelism, pairs of other ranks'
experts are in no tile, and contribute zero. Programs go by columns within bands of BAND slots: those that run at the same time
share columns of an expert's weights and rows of x in L2. With few rows an expert's weights are read once, marked evict-first.
Reference: `experts_reference.experts`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.experts.align import Alignment, align
from quire.kernels.experts.experts_reference import Act, Weights
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.configs import TileConfig, TilesConfig

BAND = 8  # slots
ADD_BLOCK = 1024


@triton.jit
def place(slots, columns, BAND: tl.constexpr):
    """(this program's slot, its number among the tiles of columns)."""
    pid = tl.program_id(0)
    band = pid // (BAND * columns)
    size = tl.minimum(slots - band * BAND, BAND)
    inside = pid - band * BAND * columns
    return band * BAND + inside % size, inside // size


@triton.jit
def _tile(at, k_left, n_inside, EVEN_K: tl.constexpr, ONCE: tl.constexpr):
    """W's tile [BLOCK_K, BLOCK_N]."""
    policy: tl.constexpr = "evict_first" if ONCE else ""
    inside = n_inside[None, :]
    if not EVEN_K:
        inside = inside & k_left[:, None]
    return tl.load(at, inside, other=0.0, eviction_policy=policy)


@triton.jit
def _rows_of_x(at, k_left, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at)
    return tl.load(at, k_left[None, :], other=0.0)


@triton.jit(do_not_specialize=["slots"])
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_stride, slots, N,
    K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BAND: tl.constexpr, ONCE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, CUBIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, column = place(slots, tl.cdiv(N, BLOCK_N), BAND)
    wait_for_previous(PDL)
    size = tl.load(tiles_ptr + 2 * slots + slot)
    if size <= 0:
        return
    expert = tl.load(tiles_ptr + slot).to(tl.int64)
    begin = tl.load(tiles_ptr + slots + slot).to(tl.int64)
    even: tl.constexpr = K % BLOCK_K == 0
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(order_ptr + begin + m, m < size, other=0) // TOP_K  # rows beyond the tile are another's, and not stored
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    PARTS: tl.constexpr = 2 if GATED else 1
    w_at = w_ptr + (expert * PARTS * N + n)[None, :] * K + k[:, None]
    up_at = w_at
    if GATED:
        up_at += N.to(tl.int64) * K
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = gate
    for start in range(0, K, BLOCK_K):
        left = k < K - start
        x = _rows_of_x(x_at + start, left, even)
        if GATED:
            gate = tl.dot(x, _tile(w_at + start, left, n < N, even, ONCE), gate, input_precision="ieee")
        up = tl.dot(x, _tile(up_at + start, left, n < N, even, ONCE), up, input_precision="ieee")
    if BIAS:
        bias = bias_ptr + expert * PARTS * N + n
        if GATED:
            gate += tl.load(bias, n < N, other=0.0).to(tl.float32)[None, :]
            bias += N
        up += tl.load(bias, n < N, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        h = swiglu(gate, up, dtype, LIMIT, ALPHA, OFFSET, CUBIC)
    else:
        h = ungated(up, dtype, ALPHA)
    tl.store(out_ptr + (begin + m)[:, None] * N + n[None, :], h.to(dtype), (m < size)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["slots"])
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, order_ptr, tiles_ptr, slots, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    ONCE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, column = place(slots, tl.cdiv(N, BLOCK_N), BAND)
    wait_for_previous(PDL)
    size = tl.load(tiles_ptr + 2 * slots + slot)
    if size <= 0:
        return
    expert = tl.load(tiles_ptr + slot).to(tl.int64)
    begin = tl.load(tiles_ptr + slots + slot).to(tl.int64)
    even: tl.constexpr = K % BLOCK_K == 0
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = h_ptr + (begin + tl.where(m < size, m, 0))[:, None] * K + k[None, :]
    w_at = w_ptr + (expert * N + n)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = k < K - start
        x = _rows_of_x(x_at + start, left, even)
        acc = tl.dot(x, _tile(w_at + start, left, n < N, even, ONCE), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + n, n < N, other=0.0).to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + begin + m, m < size, other=0)
    weights = tl.load(weights_ptr + pairs, m < size, other=0.0)
    y = acc * weights[:, None]
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), (m < size)[:, None] & (n < N)[None, :])


@triton.jit
def _add_up_kernel(
    y_ptr, shared_ptr, ids_ptr, out_ptr, shared_stride, N,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row * shared_stride + n, n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        there = n < N
        if HELD:
            there = there & (tl.load(ids_ptr + row * TOP_K + j) < HELD)
        total += tl.load(y_ptr + (row * TOP_K + j) * N + n, there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), n < N)


def _launched(config: TileConfig, block_m: int, n: int, k: int, slots: int, pdl: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and options; block_k is no longer than K needs."""
    block_k = min(config.block_k, max(16, triton.next_power_of_2(k)))
    block_n = min(config.block_n, max(16, triton.next_power_of_2(n)))
    options = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "BAND": BAND, "PDL": pdl,
        "num_warps": config.num_warps, "num_stages": config.num_stages, **launch_options(pdl),
    }  # fmt: skip
    return (slots * triton.cdiv(n, block_n),), options


def gate_up(
    x: torch.Tensor, w: Weights, act: Act, at: Alignment, top_k: int, config: TilesConfig, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [P, I] in the order of `at`, of x [T, H]."""
    hidden, inner = x.shape[1], w.down.shape[2]
    h = x.new_empty(len(at.order), inner)
    grid, options = _launched(config.gate_up, config.rows, inner, hidden, at.num_slots, pdl)
    is_gated, limit, alpha, offset, cubic = constants(act)
    _gate_up_kernel[grid](
        x, w.gate_up, x if w.gate_up_bias is None else w.gate_up_bias, h, at.order, at.tiles, x.stride(0), at.num_slots, inner,
        hidden, top_k, ONCE=config.streams, BIAS=w.gate_up_bias is not None, GATED=is_gated, LIMIT=limit,
        ALPHA=alpha, OFFSET=offset, CUBIC=cubic, **options,
    )  # fmt: skip
    return h


def down(
    h: torch.Tensor, w: Weights, weights: torch.Tensor, at: Alignment, config: TilesConfig, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [P, H] by pairs, of h [P, I] in the order of `at`."""
    inner, hidden = h.shape[1], w.down.shape[1]
    y = h.new_empty(len(at.order), hidden)
    grid, options = _launched(config.down, config.rows, hidden, inner, at.num_slots, pdl)
    _down_kernel[grid](
        h, w.down, h if w.down_bias is None else w.down_bias, weights, y, at.order, at.tiles, at.num_slots, hidden,
        inner, ONCE=config.streams, BIAS=w.down_bias is not None, **options,
    )  # fmt: skip
    return y


def add_up(y: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None, *, held: int = 0, pdl: int = PLAIN) -> torch.Tensor:
    """[T, H] of y [T k, H], with experts ids [T, k]; held: number of experts on this rank, 0: all."""
    top_k = ids.shape[1]
    rows, hidden = len(y) // top_k, y.shape[1]
    out = y.new_empty(rows, hidden)
    block = min(ADD_BLOCK, triton.next_power_of_2(hidden))
    _add_up_kernel[(rows, triton.cdiv(hidden, block))](
        y, y if shared is None else shared, ids, out, 0 if shared is None else shared.stride(0), hidden, top_k, block, held,
        shared is not None, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: TilesConfig,
    *,
    are_some: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; arguments as checked by `experts.experts`."""
    top_k, held = ids.shape[1], len(w.gate_up) if are_some else 0
    at = align(ids, len(w.gate_up), config.rows, pdl=pdl)
    h = gate_up(x, w, act, at, top_k, config, pdl=pdl)
    y = down(h, w, weights, at, config, pdl=pdl)
    return add_up(y, ids, shared, held=held, pdl=pdl)
