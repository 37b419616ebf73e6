"""8-bit experts for very few rows: a product for each (row, expert), on the plain cores, as in `pairs` for 16 bits.

    gate_up   h[t k + j] = act(x[t] @ gate_up[ids[t, j]]^T + b)        a program a pair and few of the I columns
    down      out[t] = Σ_j weights[t, j] (h[t k + j] @ down[ids[t, j]]^T + b')        a program a row and few of the H columns

Operands as in `scaled_tiles`. A thread has 16 adjacent elements of each of a program's rows of W: their sum takes one scale.
Sums are in float32, int8's too. Reference: `dequantized` operands.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.experts_reference import Act
from quire.kernels.experts.pairs import MAX_ROWS
from quire.kernels.experts.scaled_weight import ScaledExperts, ScaledWeights
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

NEIGHBOURS = tl.constexpr(16)


class Pairs(NamedTuple):
    """Output columns of a program of each product, inputs at a time, warps."""

    gate_up_n: int
    down_n: int
    block_k: int
    num_warps: int


@triton.jit
def _inputs(x_row, xs_row, columns, start, K: tl.constexpr, X_BLOCKS: tl.constexpr):
    """16 elements of x for each of `columns`, [BLOCK, 16] in float32, times their scale if there are several groups."""
    k = NEIGHBOURS * start + tl.arange(0, NEIGHBOURS * columns.shape[0])
    x = tl.load(x_row + k, k < K, other=0.0).to(tl.float32).reshape(columns.shape[0], NEIGHBOURS)
    if X_BLOCKS > 1:
        x *= tl.load(xs_row + columns // 8, columns * NEIGHBOURS < K, other=0.0)[:, None]
    return x


@triton.jit
def _added(acc, x, w_row, s_ptr, at, columns, start, total, live, K: tl.constexpr, BLOCKS: tl.constexpr):
    """acc [BLOCK_N, BLOCK] plus the products of these columns, from `start` on."""
    k = NEIGHBOURS * start + tl.arange(0, NEIGHBOURS * columns.shape[0])
    mask = live[:, None] & (k < K)[None, :]
    w = tl.load(w_row[:, None] + k[None, :], mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    # loaded flat: otherwise the compiler would distribute W's rows over threads
    part = tl.sum(w.reshape(live.shape[0], columns.shape[0], NEIGHBOURS) * x[None, :, :], 2)
    if BLOCKS > 1:
        inside = live[:, None] & (columns * NEIGHBOURS < K)[None, :]
        part *= tl.load(s_ptr + (columns // 8)[None, :] * total + at[:, None], inside, other=0.0)
    return acc + part


@triton.jit
def _finished(
    acc, s_ptr, at, bias_ptr, bias_at, xs_row, live,
    X_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    y = tl.sum(acc, 1)
    if X_BLOCKS == 1:
        y *= tl.load(xs_row)
    if BLOCKS == 1:
        y *= tl.load(s_ptr + at, live, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + bias_at, live, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, ids_ptr, out_ptr, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, CUBIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1).to(tl.int64)
    live = n < N
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    row = pair // TOP_K
    total = (2 if GATED else 1) * N  # an expert's rows of W
    first = expert * total + n
    at = expert * BLOCKS * total + n
    gate = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    up = gate
    for start in tl.static_range(0, (K + 15) // 16, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _inputs(x_ptr + row * K, xs_ptr + row * X_BLOCKS, columns, start, K, X_BLOCKS)
        gate = _added(gate, x, w_ptr + first * K, s_ptr, at, columns, start, total, live, K, BLOCKS)
        if GATED:
            up = _added(up, x, w_ptr + (first + N) * K, s_ptr, at + N, columns, start, total, live, K, BLOCKS)
    xs_row = xs_ptr + row * X_BLOCKS
    gate_y = _finished(gate, s_ptr, at, bias_ptr, first, xs_row, live, X_BLOCKS, BLOCKS, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        up_y = _finished(up, s_ptr, at + N, bias_ptr, first + N, xs_row, live, X_BLOCKS, BLOCKS, BIAS)
        h = swiglu(gate_y, up_y, dtype, LIMIT, ALPHA, OFFSET, CUBIC)
    else:
        h = ungated(gate_y, dtype, ALPHA)
    tl.store(out_ptr + pair * N + n, h.to(dtype), live)


@triton.jit
def _down_kernel(
    h_ptr, hs_ptr, w_ptr, s_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: tl.constexpr, X_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
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
        first = expert * N + n
        at = expert * BLOCKS * N + n
        acc = tl.zeros([BLOCK_N, BLOCK], tl.float32)
        for start in tl.static_range(0, (K + 15) // 16, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            h = _inputs(h_ptr + pair * K, hs_ptr + pair * X_BLOCKS, columns, start, K, X_BLOCKS)
            acc = _added(acc, h, w_ptr + first * K, s_ptr, at, columns, start, N, live, K, BLOCKS)
        y = _finished(acc, s_ptr, at, bias_ptr, first, hs_ptr + pair * X_BLOCKS, live, X_BLOCKS, BLOCKS, BIAS)
        total += y.to(dtype).to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + row * N + n, total.to(dtype), live)


def _options(w: ScaledExperts, x: Scaled, config: Pairs, pdl: int) -> dict[str, Any]:
    k = w.data.shape[2]
    block = min(config.block_k, max(128, triton.next_power_of_2(k))) // NEIGHBOURS.value
    return {
        "K": k, "X_BLOCKS": x.scales.shape[1], "BLOCKS": w.scales.shape[1], "BLOCK": block, "PDL": pdl,
        "num_warps": config.num_warps, **launch_options(pdl),
    }  # fmt: skip


def gate_up(
    x: Scaled, w: ScaledWeights, ids: torch.Tensor, act: Act, config: Pairs, dtype: torch.dtype, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [T k, I] in dtype, of x [T, H], 1 to 16 rows."""
    if len(ids) > MAX_ROWS:
        raise ValueError(f"experts: {len(ids)} rows are too many for a product a pair")
    is_gated, limit, alpha, offset, cubic = constants(act)
    inner, bias = w.down.data.shape[2], w.gate_up_bias
    h = torch.empty(ids.numel(), inner, dtype=dtype, device=x.data.device)
    _gate_up_kernel[(triton.cdiv(inner, config.gate_up_n), ids.numel())](
        x.data, x.scales, w.gate_up.data, w.gate_up.scales, h if bias is None else bias, ids, h, inner,
        TOP_K=ids.shape[1], BLOCK_N=config.gate_up_n, BIAS=bias is not None, GATED=is_gated, LIMIT=limit, ALPHA=alpha,
        OFFSET=offset, CUBIC=cubic, **_options(w.gate_up, x, config, pdl),
    )  # fmt: skip
    return h


def down(
    h: Scaled,
    w: ScaledWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    config: Pairs,
    dtype: torch.dtype,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] in dtype, of h [T k, I]."""
    hidden, bias = w.down.data.shape[1], w.down_bias
    out = torch.empty(len(ids), hidden, dtype=dtype, device=h.data.device)
    _down_kernel[(triton.cdiv(hidden, config.down_n), len(ids))](
        h.data, h.scales, w.down.data, w.down.scales, out if bias is None else bias, out if shared is None else shared, ids,
        weights, out, 0 if shared is None else shared.stride(0), hidden, TOP_K=ids.shape[1], BLOCK_N=config.down_n,
        BIAS=bias is not None, SHARED=shared is not None, **_options(w.down, h, config, pdl),
    )  # fmt: skip
    return out
