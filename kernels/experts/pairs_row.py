"""16-bit experts for very few rows on a GPU with mma (Gluon): `pairs`, with a row's experts in parallel.

Operands, results and formula as there. Weights go to mma in the layout in which they were loaded. Each of a row's experts has
its own warps of a program instead of taking turns, and `down` loads its first weights before h is ready; for that it must begin
after the choice of experts is complete, which `gate_up` ensures by never launching EARLY.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.experts import pairs
from quire.kernels.experts.experts_reference import Act, SwiGLU, Weights
from quire.kernels.experts.row_operands import (
    OUTPUTS,
    WORDS,
    experts_at_once,
    inputs_layout,
    load_inputs,
    load_words,
    own,
    products_layout,
    results_layout,
    sum_over_splits,
    weights_operand,
    words_layout,
)
from quire.kernels.experts.row_swiglu import activated
from quire.kernels.linear.int4_digits import plus
from quire.kernels.triton_support import dependent_launch
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.configs import RowConfig
from quire.kernels.tuning.current import current

_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


@gluon.jit
def _added(
    sums, words, x_ptr, x_at, x_pair, PAIRS: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Two sums [8 * streams, streams], swapped, after the products of 32 of K were added to the first."""
    x = load_inputs(x_ptr, x_at, x_pair, PAIRS, MASKED, sums[0].shape[0] // 16, dtype, layout)
    return sums[1], mma_v2(weights_operand(words, dtype, layout), x, sums[0])


@gluon.jit
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, x_stride, N,
    K: gl.constexpr, TOP_K: gl.constexpr, HELD: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, BIAS: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, p): 8 columns c of pair p; even streams are the gate's. x_stride in pairs."""
    layout: gl.constexpr = products_layout(WARPS)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCKS: gl.constexpr = K // (2 * WORDS)
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    MASKED: gl.constexpr = STEPS * WARPS > BLOCKS
    words_ptr = w_ptr.to(gl.pointer_type(gl.int32))
    first_n = gl.program_id(0) * OUTPUTS
    pair = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, words_layout(WARPS)))
    stream = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, inputs_layout(WARPS)))
    w_n = row // OUTPUTS % 2 * N + gl.minimum(first_n + row % OUTPUTS, N - 1)
    first = row // OUTPUTS // 2 * STEPS
    _wait_for_previous(PDL)
    expert = gl.load(ids_ptr + pair).to(gl.int64)
    if HELD:  # noqa: SIM102 - a constant
        if expert >= HELD:
            return
    w_at = (expert * 2 * N + w_n) * (K // 2)
    loaded = ()
    for i in gl.static_range(min(AHEAD, STEPS)):
        loaded = loaded + (load_words(words_ptr, w_at + (first + i) * WORDS, first + i < BLOCKS, MASKED),)  # type: ignore[assignment]
    F: gl.constexpr = results_layout(2, WARPS)
    x_at = gl.zeros([2 * WARPS], gl.int64, gl.SliceLayout(1, inputs_layout(WARPS))) + pair // TOP_K * x_stride
    x_pair = stream // 2 * (STEPS * WORDS)
    zeros = gl.zeros([16 * WARPS, 2 * WARPS], gl.float32, layout)
    sums = zeros, zeros
    for i in gl.static_range(STEPS):
        sums = _added(sums, loaded[i], x_ptr, x_at, x_pair + WORDS * i, K // 2, MASKED, dtype, layout)
        if i + AHEAD < STEPS:
            ahead = first + (i + AHEAD)
            loaded = loaded + (load_words(words_ptr, w_at + ahead * WORDS, ahead < BLOCKS, MASKED),)  # type: ignore[assignment]
    buffer = gl.allocate_shared_memory(gl.float32, [16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    y = sum_over_splits(buffer, own(sums[0] + sums[1], layout), 2, F)
    if BIAS:
        n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
        both = expert * 2 * N + gl.arange(0, 2, layout=gl.SliceLayout(1, F))[:, None] * N + n[None, :]
        y += gl.load(bias_ptr + both, (n < N)[None, :], other=0.0).to(gl.float32)
    gate, up = gl.split(y.permute((1, 0)))
    h = activated(gate, up, out_ptr.dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC).to(out_ptr.dtype.element_ty)
    column = first_n + gl.arange(0, OUTPUTS, layout=h.type.layout)
    gl.store(out_ptr + pair * N + column, h, column < N)


@gluon.jit
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, HELD: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    BIAS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, t): 8 columns c of row t, PARTS of its experts at a time; stream s is split s // PARTS of K."""
    layout: gl.constexpr = products_layout(WARPS)
    dtype: gl.constexpr = h_ptr.dtype.element_ty
    BLOCKS: gl.constexpr = K // (2 * WORDS)
    SPLITS: gl.constexpr = 2 * WARPS // PARTS
    STEPS: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    UNEVEN: gl.constexpr = STEPS * SPLITS > BLOCKS
    MASKED: gl.constexpr = UNEVEN or HELD > 0
    ROUNDS: gl.constexpr = TOP_K // PARTS
    ALL: gl.constexpr = ROUNDS * STEPS
    words_ptr = w_ptr.to(gl.pointer_type(gl.int32))
    first_n = gl.program_id(0) * OUTPUTS
    first_pair = gl.program_id(1).to(gl.int64) * TOP_K
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, words_layout(WARPS)))
    w_n = gl.minimum(first_n + row % OUTPUTS, N - 1)
    first = row // OUTPUTS // PARTS * STEPS
    w_at = ()
    limit = ()
    for r in gl.static_range(ROUNDS):
        expert = gl.load(ids_ptr + first_pair + r * PARTS + row // OUTPUTS % PARTS).to(gl.int64)
        w_at = w_at + ((expert * N + w_n) * (K // 2),)  # type: ignore[assignment]
        limit = limit + (gl.where(expert < HELD, BLOCKS, 0) if HELD else BLOCKS,)  # type: ignore[assignment]
    loaded = ()
    for i in gl.static_range(min(AHEAD, ALL)):
        at = first + i % STEPS
        loaded = loaded + (load_words(words_ptr, w_at[i // STEPS] + at * WORDS, at < limit[i // STEPS], MASKED),)  # type: ignore[assignment]
    F: gl.constexpr = results_layout(PARTS, WARPS)
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
    j = gl.arange(0, PARTS, layout=gl.SliceLayout(1, F))
    live = n < N
    _wait_for_previous(PDL)
    stream = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, inputs_layout(WARPS)))
    x_at = (first_pair + stream % PARTS) * (K // 2)
    x_pair = stream // PARTS * (STEPS * WORDS)
    total = gl.zeros([OUTPUTS], gl.float32, gl.SliceLayout(0, F))
    if SHARED:
        total += gl.load(shared_ptr + gl.program_id(1).to(gl.int64) * shared_stride + n, live, other=0.0).to(gl.float32)
    zeros = gl.zeros([16 * WARPS, 2 * WARPS], gl.float32, layout)
    buffers = gl.allocate_shared_memory(gl.float32, [ROUNDS, 16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ALL):
        if i % STEPS == 0:
            sums = zeros, zeros
        row_at = x_at + i // STEPS * PARTS * (K // 2)
        sums = _added(sums, loaded[i], h_ptr, row_at, x_pair + WORDS * (i % STEPS), K // 2, UNEVEN, dtype, layout)
        if i + AHEAD < ALL:
            at = first + (i + AHEAD) % STEPS
            words = load_words(words_ptr, w_at[(i + AHEAD) // STEPS] + at * WORDS, at < limit[(i + AHEAD) // STEPS], MASKED)
            loaded = loaded + (words,)  # type: ignore[assignment]
        if i % STEPS == STEPS - 1:
            pair = first_pair + i // STEPS * PARTS + j
            expert = gl.load(ids_ptr + pair).to(gl.int64)
            y = sum_over_splits(buffers.index(i // STEPS), own(sums[0] + sums[1], layout), PARTS, F)
            is_here = n[None, :] < (gl.where(expert < HELD, N, 0) if HELD else N + 0 * expert)[:, None]
            if BIAS:
                y += gl.load(bias_ptr + expert[:, None] * N + n[None, :], is_here, other=0.0).to(gl.float32)
            weighted = y.to(out_ptr.dtype.element_ty).to(gl.float32) * gl.load(weights_ptr + pair)[:, None]
            if HELD:  # h of experts on other ranks was never written
                weighted = gl.where(is_here, weighted, 0.0)
            total += gl.reduce(weighted, 0, plus)
    gl.store(out_ptr + gl.program_id(1).to(gl.int64) * N + n, total.to(out_ptr.dtype.element_ty), live)


def gate_up(
    x: torch.Tensor, w: Weights, ids: torch.Tensor, act: SwiGLU, warps: int, ahead: int, *, held: int = 0, pdl: int = PLAIN
) -> torch.Tensor:
    """h [T k, I] of x [T, H]; held: number of experts on this rank, 0: all."""
    hidden, inner, bias = x.shape[1], w.down.shape[2], w.gate_up_bias
    h = x.new_empty(ids.numel(), inner)
    _gate_up_kernel[(triton.cdiv(inner, OUTPUTS.value), ids.numel())](
        x, w.gate_up, x if bias is None else bias, ids, h, x.stride(0) // 2, inner, hidden, ids.shape[1], held, warps, ahead,
        bias is not None, act.limit, act.alpha, act.offset, act.cubic, pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return h


def down(
    h: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    warps: int,
    ahead: int,
    *,
    held: int = 0,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of h [T k, I]; must follow a launch that did not begin before ids and weights were complete."""
    (rows, top_k), (_, hidden, inner), bias = ids.shape, w.down.shape, w.down_bias
    out = h.new_empty(rows, hidden)
    _down_kernel[(triton.cdiv(hidden, OUTPUTS.value), rows)](
        h, w.down, h if bias is None else bias, h if shared is None else shared, ids, weights, out,
        0 if shared is None else shared.stride(0), hidden, inner, top_k, experts_at_once(top_k, 2 * warps), held, warps, ahead,
        bias is not None, shared is not None, pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: RowConfig,
    *,
    are_some: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], few rows, with experts ids [T, k]; arguments as checked by `experts.experts`."""
    held, pdl = len(w.gate_up) if are_some else 0, min(pdl, LATE)
    if config.gate_up_warps and isinstance(act, SwiGLU):
        h = gate_up(x, w, ids, act, config.gate_up_warps, config.ahead, held=held, pdl=pdl)
    else:
        h = pairs.gate_up(x, w, ids, act, current().experts.pair, held=held, pdl=pdl)
    return down(h, w, ids, weights, shared, config.down_warps, config.ahead, held=held, pdl=pdl)
