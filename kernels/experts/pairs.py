"""Experts for very few rows: a product for each (row, expert), on the plain cores, in two launches without alignment.

    gate_up   h[t k + j] = act(x[t] @ gate_up[ids[t, j]]^T + b)        a program a pair and few of the I columns
    down      out[t] = Σ_j weights[t, j] (h[t k + j] @ down[ids[t, j]]^T + b')        a program a row and few of the H columns

One program sums over j, in float32 and in order; `shared` [T, H] comes first. Moves each pair's weights once, marked
evict-first: rows that share an expert read it twice, from L2 at best, so from a few rows on `tiles` is faster (the tuning table
says where). All of K lies within a program. With expert parallelism, pairs of other ranks' experts are skipped.
Reference: `experts_reference.experts`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.experts.experts_reference import Act, Weights
from quire.kernels.experts.swiglu import constants, swiglu, ungated
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.configs import PairConfig

MAX_ROWS = 16


@triton.jit
def _row_times(acc, w_row, x_row, k, inside, K: tl.constexpr):
    """Add w · x over all of K to acc [BLOCK_N, BLOCK_K], without summing over lanes."""
    for start in tl.static_range(0, K, k.shape[0]):
        w = tl.load(
            w_row + start + k[None, :], inside[:, None] & (start + k < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_row + start + k, start + k < K, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    return acc


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, x_stride, N,
    K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    CUBIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if HELD:  # noqa: SIM102 - a constant
        if expert >= HELD:
            return
    x_row = x_ptr + (pair // TOP_K) * x_stride
    zeros = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        w_row = w_ptr + (expert * 2 * N + n)[:, None] * K
        gate = tl.sum(_row_times(zeros, w_row, x_row, k, n < N, K), 1)
        up = tl.sum(_row_times(zeros, w_row + N.to(tl.int64) * K, x_row, k, n < N, K), 1)
        if BIAS:
            bias = bias_ptr + expert * 2 * N + n
            gate += tl.load(bias, n < N, other=0.0).to(tl.float32)
            up += tl.load(bias + N, n < N, other=0.0).to(tl.float32)
        h = swiglu(gate, up, dtype, LIMIT, ALPHA, OFFSET, CUBIC)
    else:
        up = tl.sum(_row_times(zeros, w_ptr + (expert * N + n)[:, None] * K, x_row, k, n < N, K), 1)
        if BIAS:
            up += tl.load(bias_ptr + expert * N + n, n < N, other=0.0).to(tl.float32)
        h = ungated(up, dtype, ALPHA)
    tl.store(out_ptr + pair * N + n, h.to(dtype), n < N)


@triton.jit
def _weighted(
    h_ptr, w_ptr, bias_ptr, weights_ptr, pair, expert, n, N, k,
    K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One pair's contribution to a row's result."""
    w_row = w_ptr + (expert * N + n)[:, None] * K
    zeros = tl.zeros([n.shape[0], k.shape[0]], tl.float32)
    y = tl.sum(_row_times(zeros, w_row, h_ptr + pair * K, k, n < N, K), 1)
    if BIAS:
        y += tl.load(bias_ptr + expert * N + n, n < N, other=0.0).to(tl.float32)
    return y.to(h_ptr.dtype.element_ty).to(tl.float32) * tl.load(weights_ptr + pair)


@triton.jit
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row * shared_stride + n, n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        if HELD:
            if expert < HELD:
                total += _weighted(h_ptr, w_ptr, bias_ptr, weights_ptr, pair, expert, n, N, k, K, BIAS)
        else:
            total += _weighted(h_ptr, w_ptr, bias_ptr, weights_ptr, pair, expert, n, N, k, K, BIAS)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), n < N)


def can_use_mma(x: torch.Tensor, inner: int) -> bool:
    """Whether `pairs_row` can compute these: 16 bits, K in units of 32, 16-byte aligned rows, a known GPU and Triton."""
    fits = x.shape[1] % 32 == inner % 32 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype.itemsize == 2 and fits and hopper.available(x.device)


def gate_up(
    x: torch.Tensor, w: Weights, ids: torch.Tensor, act: Act, config: PairConfig, *, held: int = 0, pdl: int = PLAIN
) -> torch.Tensor:
    """h [T k, I] of x [T, H]; held: number of experts on this rank, 0: all."""
    (_, hidden), inner, top_k = x.shape, w.down.shape[2], ids.shape[1]
    h = x.new_empty(ids.numel(), inner)
    block_k = min(config.block_k, triton.next_power_of_2(hidden))
    _gate_up_kernel[(triton.cdiv(inner, config.gate_up_n), ids.numel())](
        x, w.gate_up, x if w.gate_up_bias is None else w.gate_up_bias, ids, h, x.stride(0), inner,
        hidden, top_k, config.gate_up_n, block_k, held, w.gate_up_bias is not None, *constants(act), pdl,
        num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return h


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: PairConfig,
    *,
    are_some: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], 1 to 16 rows, with experts ids [T, k]; arguments as checked by `experts.experts`."""
    (rows, hidden), inner, top_k = x.shape, w.down.shape[2], ids.shape[1]
    if rows > MAX_ROWS:
        raise ValueError(f"experts: {rows} rows are too many for a product a pair")
    out = x.new_empty(rows, hidden)
    held = len(w.gate_up) if are_some else 0
    h = gate_up(x, w, ids, act, config, held=held, pdl=pdl)
    block_k = min(config.block_k, triton.next_power_of_2(inner))
    _down_kernel[(triton.cdiv(hidden, config.down_n), rows)](
        h, w.down, x if w.down_bias is None else w.down_bias, x if shared is None else shared, ids, weights, out,
        0 if shared is None else shared.stride(0), hidden,
        inner, top_k, config.down_n, block_k, held, w.down_bias is not None, shared is not None, pdl,
        num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out
