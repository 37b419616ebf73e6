"""4-bit experts for very few rows on a GPU with mma (Gluon): `four_bits_pairs` with a third of its instructions.

Operands, results and formula as there; x bfloat16. Weights become bfloat16 in registers, exactly, two by two, and go to mma in
the layout in which they were loaded: mxfp4's with their scale, integers minus their zero point, with each group's sum scaled in
float32. A program has all its loads of W in flight at once, and computes a row's experts in parallel: one after the other, each
would wait for memory. `down` loads its weights before h is ready; for that it must begin after the choice of experts is
complete, which `gate_up` ensures by never launching EARLY.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.experts import four_bits_pairs, four_bits_warp
from quire.kernels.experts.experts_reference import Act, SwiGLU
from quire.kernels.experts.four_bits_pairs import PAIRS
from quire.kernels.experts.four_bits_tiles import operands, sizes
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights
from quire.kernels.experts.row_four_bits import codes, less, load_block, span, times
from quire.kernels.experts.row_operands import (
    OUTPUTS,
    WORDS,
    experts_at_once,
    inputs_layout,
    load_inputs,
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

_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


@gluon.jit
def _multiply(
    sums, loaded, x_ptr, x_at, x_pair,
    PAIRS: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Two sums [8 * streams, streams], plus a chunk's products."""
    words, scales, zeros = loaded
    even, odd = sums
    SPAN: gl.constexpr = 1 if MX else span(GROUP)
    for u in gl.static_range(0, 4, SPAN):
        part = gl.zeros(even.shape, gl.float32, layout)
        for t in gl.static_range(u, u + SPAN):
            x = load_inputs(x_ptr, x_at, x_pair + 16 * t, PAIRS, MASKED, sums[0].shape[0] // 16, gl.bfloat16, layout)
            if MX:
                factor = ((scales[0] >> (8 * t)) & 0xFF) * 0x00800080
                w = weights_operand(times(codes(words, t), factor[:, None]), gl.bfloat16, layout)
                if t % 2 == 0:
                    even = mma_v2(w, x, even)
                else:
                    odd = mma_v2(w, x, odd)
            else:
                zero = zeros[u // SPAN].to(gl.int32)[:, None] if ZEROS else gl.full([1, 1], 8, gl.int32, words.type.layout)
                part = mma_v2(weights_operand(less(words, zero, t), gl.bfloat16, layout), x, part)
        if not MX:
            scale = gl.convert_layout(scales[u // SPAN].to(gl.float32), gl.SliceLayout(1, layout), assert_trivial=True)
            even = even + part * scale[:, None]
    return even, odd


@gluon.jit
def _gate_up_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, ids_ptr, out_ptr, x_stride, N,
    K: gl.constexpr, ROW_WORDS: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, p): 8 columns c of pair p; even streams are the gate's. x_stride in pairs."""
    layout: gl.constexpr = products_layout(WARPS)
    rows: gl.constexpr = gl.SliceLayout(1, words_layout(WARPS))
    streams: gl.constexpr = gl.SliceLayout(1, inputs_layout(WARPS))
    BLOCKS: gl.constexpr = ROW_WORDS // WORDS
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    MASKED: gl.constexpr = STEPS * WARPS > BLOCKS
    first_n = gl.program_id(0) * OUTPUTS
    pair = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 16 * WARPS, layout=rows)
    stream = gl.arange(0, 2 * WARPS, layout=streams)
    w_n = row // OUTPUTS % 2 * N + gl.minimum(first_n + row % OUTPUTS, N - 1)
    first = row // OUTPUTS // 2 * STEPS
    _wait_for_previous(PDL)
    expert = gl.load(ids_ptr + pair).to(gl.int64)
    w_at = (expert * 2 * N + w_n) * ROW_WORDS
    s_at = expert * SCALES * 2 * N + w_n
    loaded = ()
    for i in gl.static_range(min(AHEAD, STEPS)):
        loaded = loaded + (load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, 2 * N, first + i, BLOCKS, MASKED, GROUP, MX, ZEROS),)  # type: ignore[assignment]
    F: gl.constexpr = results_layout(2, WARPS)
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
    both = expert * 2 * N + gl.arange(0, 2, layout=gl.SliceLayout(1, F))[:, None] * N + n[None, :]
    live = n < N
    factors = gl.load(factor_ptr + both, live[None, :], other=0.0) if MX else 1.0
    bias = gl.load(bias_ptr + both, live[None, :], other=0.0).to(gl.float32) if BIAS else 0.0
    x_at = gl.zeros([2 * WARPS], gl.int64, streams) + pair // TOP_K * x_stride
    x_pair = stream // 2 * (STEPS * 64)
    sums = gl.zeros([16 * WARPS, 2 * WARPS], gl.float32, layout), gl.zeros([16 * WARPS, 2 * WARPS], gl.float32, layout)
    X_MASKED: gl.constexpr = MASKED or K % 128 != 0
    for i in gl.static_range(STEPS):
        sums = _multiply(sums, loaded[i], x_ptr, x_at, x_pair + 64 * i, K // 2, X_MASKED, GROUP, MX, ZEROS, layout)
        if i + AHEAD < STEPS:
            ahead = first + (i + AHEAD)
            loaded = loaded + (load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, 2 * N, ahead, BLOCKS, MASKED, GROUP, MX, ZEROS),)  # type: ignore[assignment]
    buffer = gl.allocate_shared_memory(gl.float32, [16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    y = sum_over_splits(buffer, own(sums[0] + sums[1], layout), 2, F) * factors + bias
    gate, up = gl.split(y.permute((1, 0)))
    h = activated(gate, up, out_ptr.dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC).to(out_ptr.dtype.element_ty)
    column = first_n + gl.arange(0, OUTPUTS, layout=h.type.layout)
    gl.store(out_ptr + pair * N + column, h, column < N)


@gluon.jit
def _down_kernel(
    h_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: gl.constexpr, ROW_WORDS: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    PARTS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr,
    BIAS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, t): 8 columns c of row t, PARTS of its experts at a time; stream s is split s // PARTS of K."""
    layout: gl.constexpr = products_layout(WARPS)
    rows: gl.constexpr = gl.SliceLayout(1, words_layout(WARPS))
    streams: gl.constexpr = gl.SliceLayout(1, inputs_layout(WARPS))
    BLOCKS: gl.constexpr = ROW_WORDS // WORDS
    SPLITS: gl.constexpr = 2 * WARPS // PARTS
    STEPS: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    MASKED: gl.constexpr = STEPS * SPLITS > BLOCKS
    ROUNDS: gl.constexpr = TOP_K // PARTS
    ALL: gl.constexpr = ROUNDS * STEPS
    first_n = gl.program_id(0) * OUTPUTS
    first_pair = gl.program_id(1).to(gl.int64) * TOP_K
    row = gl.arange(0, 16 * WARPS, layout=rows)
    part = row // OUTPUTS % PARTS
    w_n = gl.minimum(first_n + row % OUTPUTS, N - 1)
    first = row // OUTPUTS // PARTS * STEPS
    w_at = ()
    s_at = ()
    for r in gl.static_range(ROUNDS):
        expert = gl.load(ids_ptr + first_pair + r * PARTS + part).to(gl.int64)
        w_at = w_at + ((expert * N + w_n) * ROW_WORDS,)  # type: ignore[assignment]
        s_at = s_at + (expert * SCALES * N + w_n,)  # type: ignore[assignment]
    loaded = ()
    for i in gl.static_range(min(AHEAD, ALL)):
        loaded = loaded + (  # type: ignore[assignment]
            load_block(
                w_ptr, s_ptr, z_ptr, w_at[i // STEPS], s_at[i // STEPS], N, first + i % STEPS, BLOCKS, MASKED, GROUP, MX, ZEROS
            ),
        )
    F: gl.constexpr = results_layout(PARTS, WARPS)
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
    j = gl.arange(0, PARTS, layout=gl.SliceLayout(1, F))
    live = n < N
    _wait_for_previous(PDL)
    stream = gl.arange(0, 2 * WARPS, layout=streams)
    x_at = (first_pair + stream % PARTS) * (K // 2)
    x_pair = stream // PARTS * (STEPS * 64)
    total = gl.zeros([OUTPUTS], gl.float32, gl.SliceLayout(0, F))
    if SHARED:
        total += gl.load(shared_ptr + gl.program_id(1).to(gl.int64) * shared_stride + n, live, other=0.0).to(gl.float32)
    even = gl.zeros([16 * WARPS, 2 * WARPS], gl.float32, layout)
    odd = even
    X_MASKED: gl.constexpr = MASKED or K % 128 != 0
    buffers = gl.allocate_shared_memory(gl.float32, [ROUNDS, 16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ALL):
        if i % STEPS == 0:
            sums = even, odd
        mine = x_pair + 64 * (i % STEPS)
        row_at = x_at + i // STEPS * PARTS * (K // 2)
        sums = _multiply(sums, loaded[i], h_ptr, row_at, mine, K // 2, X_MASKED, GROUP, MX, ZEROS, layout)
        if i + AHEAD < ALL:
            ahead = first + (i + AHEAD) % STEPS
            loaded = loaded + (  # type: ignore[assignment]
                load_block(
                    w_ptr,
                    s_ptr,
                    z_ptr,
                    w_at[(i + AHEAD) // STEPS],
                    s_at[(i + AHEAD) // STEPS],
                    N,
                    ahead,
                    BLOCKS,
                    MASKED,
                    GROUP,
                    MX,
                    ZEROS,
                ),
            )
        if i % STEPS == STEPS - 1:
            pair = first_pair + i // STEPS * PARTS + j
            at = gl.load(ids_ptr + pair).to(gl.int64)[:, None] * N + n[None, :]
            y = sum_over_splits(buffers.index(i // STEPS), own(sums[0] + sums[1], layout), PARTS, F)
            if MX:
                y *= gl.load(factor_ptr + at, live[None, :], other=0.0)
            if BIAS:
                y += gl.load(bias_ptr + at, live[None, :], other=0.0).to(gl.float32)
            weighted = y.to(out_ptr.dtype.element_ty).to(gl.float32) * gl.load(weights_ptr + pair)[:, None]
            total += gl.reduce(weighted, 0, plus)
    gl.store(out_ptr + gl.program_id(1).to(gl.int64) * N + n, total.to(out_ptr.dtype.element_ty), live)


def _options(w: FourBits, warps: int, pairs: int, config: RowConfig, pdl: int) -> dict[str, Any]:
    """Keyword arguments of both products' kernels: ROW_PAIRS for one warp a program, else WARPS."""
    options = {
        "AHEAD": config.ahead, "MX": w.is_mx, "ZEROS": w.zeros is not None, "PDL": pdl, "num_warps": warps,
        **launch_options(pdl),
    }  # fmt: skip
    return {"ROW_PAIRS": pairs, **options} if warps == 1 else {"WARPS": warps, **options}


def _gate_up(x: torch.Tensor, w: FourBitWeights, ids: torch.Tensor, act: Act, config: RowConfig, pdl: int) -> torch.Tensor:
    """h [T k, I] of x [T, H]; without a gate on the plain cores."""
    if not isinstance(act, SwiGLU):
        return four_bits_pairs.gate_up(x, w, ids, act, PAIRS, pdl=pdl)
    inner, bias, warps = w.down.inputs, w.gate_up_bias, config.gate_up_warps
    h = x.new_empty(ids.numel(), inner)
    kernel, columns = (four_bits_warp.gate_up_kernel, config.gate_up_pairs) if warps == 1 else (_gate_up_kernel, OUTPUTS.value)
    kernel[(triton.cdiv(inner, columns), ids.numel())](
        x, *operands(w.gate_up), x if bias is None else bias, ids, h, x.stride(0) // 2, inner, *sizes(w.gate_up), ids.shape[1],
        BIAS=bias is not None, LIMIT=act.limit, ALPHA=act.alpha, OFFSET=act.offset, CUBIC=act.cubic,
        **_options(w.gate_up, warps, config.gate_up_pairs, config, pdl),
    )  # fmt: skip
    return h


def experts(
    x: torch.Tensor,
    w: FourBitWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: RowConfig,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], few rows of bfloat16, with experts ids [T, k]; arguments as checked by `experts.experts`."""
    (rows, hidden), top_k, bias, warps, pdl = x.shape, ids.shape[1], w.down_bias, config.down_warps, min(pdl, LATE)
    h = _gate_up(x, w, ids, act, config, pdl)
    out = x.new_empty(rows, hidden)
    kernel, columns = (four_bits_warp.down_kernel, 2 * config.down_pairs) if warps == 1 else (_down_kernel, OUTPUTS.value)
    kernel[(triton.cdiv(hidden, columns), rows)](
        h, *operands(w.down), x if bias is None else bias, x if shared is None else shared, ids, weights, out,
        0 if shared is None else shared.stride(0), hidden, *sizes(w.down), top_k, **_parts(top_k, warps),
        BIAS=bias is not None, SHARED=shared is not None, **_options(w.down, warps, config.down_pairs, config, pdl),
    )  # fmt: skip
    return out


def _parts(top_k: int, warps: int) -> dict[str, int]:
    return {} if warps == 1 else {"PARTS": experts_at_once(top_k, 2 * warps)}
