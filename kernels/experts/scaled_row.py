"""8-bit experts for very few rows on a GPU with mma (Gluon): `scaled_pairs`, with a row's experts in parallel.

Operands, results and formula as there. fp8 goes to mma as float16, which holds it exactly, int8 as it is, summed in int32;
scales are applied in float32, to the sums of each group of 128 of K, or to the total. `down` loads its first weights before h
is ready; for that it must begin after the choice of experts is complete: the launch before it is never EARLY.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.experts.experts_reference import SwiGLU
from quire.kernels.experts.row_operands import (
    OUTPUTS,
    bits,
    experts_at_once,
    own,
    products_layout,
    results_layout,
    sum_over_splits,
)
from quire.kernels.experts.row_swiglu import activated
from quire.kernels.experts.scaled_weight import ScaledWeights
from quire.kernels.linear.int4_digits import plus
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support import dependent_launch
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options
from quire.kernels.tuning.configs import RowConfig

_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)
UNIT = gl.constexpr(64)  # of K, bytes of a row that are multiplied at once; a scale's group is two units


@gluon.constexpr_function
def weights_layout(warps: int) -> gl.DistributedLinearLayout:
    """For bytes [8 * streams, 64]: 16 adjacent ones a thread."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16 << i, 0] for i in range(bits(warps))], [], [16 * warps, 64],
    )  # fmt: skip


@gluon.constexpr_function
def inputs_layout(warps: int) -> gl.DistributedLinearLayout:
    """For bytes [streams, 64], which every warp holds."""
    more = [[8 << i, 0] for i in range(bits(warps) - 2)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], *more], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[0, 0]] * bits(warps), [],
        [2 * warps, 64],
    )  # fmt: skip


@gluon.jit
def _operand(numbers):
    """Bytes [n, 64] in mma's order of K."""
    if numbers.dtype == gl.int8:
        return numbers.reshape([numbers.shape[0], 4, 2, 2, 4]).permute((0, 2, 3, 1, 4)).reshape([numbers.shape[0], 64])
    else:
        wide = numbers.to(gl.float16).reshape([numbers.shape[0], 4, 4, 2, 2])
        return wide.permute((0, 2, 3, 1, 4)).reshape([numbers.shape[0], 64])


@gluon.jit
def _load(ptr, at, unit, UNITS: gl.constexpr, MASKED: gl.constexpr, IS_WEIGHT: gl.constexpr, lines: gl.constexpr):
    """64 bytes of each row at `at` [n]: its unit number `unit` [n]."""
    numbers = ptr + (at + unit * UNIT)[:, None] + gl.arange(0, UNIT, layout=gl.SliceLayout(0, lines))[None, :]
    policy: gl.constexpr = "evict_first" if IS_WEIGHT else ""
    if MASKED:
        return gl.load(numbers, (unit < UNITS)[:, None], other=0.0, eviction_policy=policy)
    else:
        return gl.load(numbers, eviction_policy=policy)


@gluon.jit
def _load_block(w_ptr, w_at, block, UNITS: gl.constexpr, MASKED: gl.constexpr, WARPS: gl.constexpr):
    """A group of 128 of K, as two units."""
    first = _load(w_ptr, w_at, 2 * block, UNITS, MASKED, True, weights_layout(WARPS))
    return first, _load(w_ptr, w_at, 2 * block + 1, UNITS, MASKED, True, weights_layout(WARPS))


@gluon.jit
def _scale(ptr, at, block, LIMIT: gl.constexpr, step):
    """The scale of a group; 1 if there is only one (LIMIT 1), which is applied to the total."""
    if LIMIT > 1:
        return gl.load(ptr + at + block * step, block < LIMIT, other=0.0)
    else:
        return gl.full(block.shape, 1.0, gl.float32, block.type.layout)


@gluon.jit
def _added(
    acc, loaded, x_ptr, x_at, x_block, scale, x_scale,
    UNITS: gl.constexpr, MASKED: gl.constexpr, BY_BLOCK: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """acc [8 * streams, streams] plus the products of 128 of K, times their scales if there are several groups."""
    WIDTH: gl.constexpr = 4 if x_ptr.dtype.element_ty == gl.int8 else 2
    part = acc
    if BY_BLOCK:
        part = gl.zeros(acc.shape, gl.int32 if WIDTH == 4 else gl.float32, layout)
    for half in gl.static_range(2):
        x = _operand(_load(x_ptr, x_at, 2 * x_block + half, UNITS, MASKED, False, inputs_layout(WARPS))).permute((1, 0))
        w = gl.convert_layout(_operand(loaded[half]), gl.DotOperandLayout(0, layout, WIDTH), assert_trivial=True)
        part = mma_v2(w, gl.convert_layout(x, gl.DotOperandLayout(1, layout, WIDTH), assert_trivial=True), part)
    if BY_BLOCK:
        part = acc + part.to(gl.float32) * (scale[:, None] * x_scale[None, :])
    return part


@gluon.jit
def _gate_up_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, ids_ptr, out_ptr, N,
    K: gl.constexpr, X_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr, TOP_K: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, BIAS: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr,
    CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, p): 8 columns c of pair p; even streams are the gate's."""
    layout: gl.constexpr = products_layout(WARPS)
    UNITS: gl.constexpr = K // UNIT
    STEPS: gl.constexpr = ((UNITS + 1) // 2 + WARPS - 1) // WARPS
    MASKED: gl.constexpr = 2 * STEPS * WARPS > UNITS
    BY_BLOCK: gl.constexpr = BLOCKS > 1 or X_BLOCKS > 1
    ACC: gl.constexpr = gl.int32 if x_ptr.dtype.element_ty == gl.int8 and not BY_BLOCK else gl.float32
    first_n = gl.program_id(0) * OUTPUTS
    pair = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, weights_layout(WARPS)))
    stream = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, inputs_layout(WARPS)))
    w_n = row // OUTPUTS % 2 * N + gl.minimum(first_n + row % OUTPUTS, N - 1)
    first = row // OUTPUTS // 2 * STEPS
    _wait_for_previous(PDL)
    expert = gl.load(ids_ptr + pair).to(gl.int64)
    w_at = (expert * 2 * N + w_n) * K
    loaded = ()
    for i in gl.static_range(min(AHEAD, STEPS)):
        loaded = loaded + (_load_block(w_ptr, w_at, first + i, UNITS, MASKED, WARPS),)  # type: ignore[assignment]
    # rows and columns of the sums
    s_row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, layout))
    s_at = expert * BLOCKS * 2 * N + s_row // OUTPUTS % 2 * N + gl.minimum(first_n + s_row % OUTPUTS, N - 1)
    column = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(0, layout))
    x_row = pair // TOP_K
    x_at = gl.zeros([2 * WARPS], gl.int64, gl.SliceLayout(1, inputs_layout(WARPS))) + x_row * K
    acc = gl.zeros([16 * WARPS, 2 * WARPS], ACC, layout)
    for i in gl.static_range(STEPS):
        scale = _scale(s_ptr, s_at, s_row // OUTPUTS // 2 * STEPS + i, BLOCKS, 2 * N)
        x_scale = _scale(xs_ptr, x_row * X_BLOCKS, column // 2 * STEPS + i, X_BLOCKS, 1)
        x_block = stream // 2 * STEPS + i
        acc = _added(acc, loaded[i], x_ptr, x_at, x_block, scale, x_scale, UNITS, MASKED, BY_BLOCK, WARPS, layout)
        if i + AHEAD < STEPS:
            block = _load_block(w_ptr, w_at, first + (i + AHEAD), UNITS, MASKED, WARPS)
            loaded = loaded + (block,)  # type: ignore[assignment]
    F: gl.constexpr = results_layout(2, WARPS)
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, F))
    buffer = gl.allocate_shared_memory(gl.float32, [16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    y = sum_over_splits(buffer, own(acc.to(gl.float32), layout), 2, F)
    if X_BLOCKS == 1:
        y *= gl.load(xs_ptr + x_row)
    if BLOCKS == 1:
        y *= gl.load(s_ptr + (expert * 2 + half)[:, None] * N + n[None, :], (n < N)[None, :], other=0.0)
    if BIAS:
        y += gl.load(bias_ptr + (expert * 2 + half)[:, None] * N + n[None, :], (n < N)[None, :], other=0.0).to(gl.float32)
    gate, up = gl.split(y.permute((1, 0)))
    h = activated(gate, up, out_ptr.dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC).to(out_ptr.dtype.element_ty)
    at = first_n + gl.arange(0, OUTPUTS, layout=h.type.layout)
    gl.store(out_ptr + pair * N + at, h, at < N)


@gluon.jit
def _down_kernel(
    h_ptr, hs_ptr, w_ptr, s_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: gl.constexpr, X_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, BIAS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, t): 8 columns c of row t, PARTS of its experts at a time; stream s is split s // PARTS of K."""
    layout: gl.constexpr = products_layout(WARPS)
    UNITS: gl.constexpr = K // UNIT
    SPLITS: gl.constexpr = 2 * WARPS // PARTS
    STEPS: gl.constexpr = ((UNITS + 1) // 2 + SPLITS - 1) // SPLITS
    MASKED: gl.constexpr = 2 * STEPS * SPLITS > UNITS
    ALL: gl.constexpr = TOP_K // PARTS * STEPS
    BY_BLOCK: gl.constexpr = BLOCKS > 1 or X_BLOCKS > 1
    ACC: gl.constexpr = gl.int32 if h_ptr.dtype.element_ty == gl.int8 and not BY_BLOCK else gl.float32
    first_n = gl.program_id(0) * OUTPUTS
    first_pair = gl.program_id(1).to(gl.int64) * TOP_K
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, weights_layout(WARPS)))
    first = row // OUTPUTS // PARTS * STEPS
    s_row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, layout))
    w_at = ()
    s_at = ()
    for r in gl.static_range(TOP_K // PARTS):
        expert = gl.load(ids_ptr + first_pair + r * PARTS + row // OUTPUTS % PARTS).to(gl.int64)
        s_expert = gl.load(ids_ptr + first_pair + r * PARTS + s_row // OUTPUTS % PARTS).to(gl.int64)
        w_at = w_at + ((expert * N + gl.minimum(first_n + row % OUTPUTS, N - 1)) * K,)  # type: ignore[assignment]
        s_at = s_at + (s_expert * BLOCKS * N + gl.minimum(first_n + s_row % OUTPUTS, N - 1),)  # type: ignore[assignment]
    loaded = ()
    for i in gl.static_range(min(AHEAD, ALL)):
        block = _load_block(w_ptr, w_at[i // STEPS], first + i % STEPS, UNITS, MASKED, WARPS)
        loaded = loaded + (block,)  # type: ignore[assignment]
    F: gl.constexpr = results_layout(PARTS, WARPS)
    n = first_n + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, F))
    j = gl.arange(0, PARTS, layout=gl.SliceLayout(1, F))
    live = n < N
    _wait_for_previous(PDL)
    stream = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, inputs_layout(WARPS)))
    column = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(0, layout))
    total = gl.zeros([OUTPUTS], gl.float32, gl.SliceLayout(0, F))
    if SHARED:
        total += gl.load(shared_ptr + gl.program_id(1).to(gl.int64) * shared_stride + n, live, other=0.0).to(gl.float32)
    buffers = gl.allocate_shared_memory(gl.float32, [TOP_K // PARTS, 16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ALL):
        if i % STEPS == 0:
            acc = gl.zeros([16 * WARPS, 2 * WARPS], ACC, layout)
        round_pair = first_pair + i // STEPS * PARTS
        scale = _scale(s_ptr, s_at[i // STEPS], s_row // OUTPUTS // PARTS * STEPS + i % STEPS, BLOCKS, N)
        xs_at = (round_pair + column % PARTS) * X_BLOCKS
        x_scale = _scale(hs_ptr, xs_at, column // PARTS * STEPS + i % STEPS, X_BLOCKS, 1)
        x_block = stream // PARTS * STEPS + i % STEPS
        x_at = (round_pair + stream % PARTS) * K
        acc = _added(acc, loaded[i], h_ptr, x_at, x_block, scale, x_scale, UNITS, MASKED, BY_BLOCK, WARPS, layout)
        if i + AHEAD < ALL:
            block = _load_block(w_ptr, w_at[(i + AHEAD) // STEPS], first + (i + AHEAD) % STEPS, UNITS, MASKED, WARPS)
            loaded = loaded + (block,)  # type: ignore[assignment]
        if i % STEPS == STEPS - 1:
            pair = round_pair + j
            at = gl.load(ids_ptr + pair).to(gl.int64)[:, None] * N + n[None, :]
            y = sum_over_splits(buffers.index(i // STEPS), own(acc.to(gl.float32), layout), PARTS, F)
            if X_BLOCKS == 1:
                y *= gl.load(hs_ptr + pair)[:, None]
            if BLOCKS == 1:
                y *= gl.load(s_ptr + at, live[None, :], other=0.0)
            if BIAS:
                y += gl.load(bias_ptr + at, live[None, :], other=0.0).to(gl.float32)
            weighted = y.to(out_ptr.dtype.element_ty).to(gl.float32) * gl.load(weights_ptr + pair)[:, None]
            total += gl.reduce(weighted, 0, plus)
    gl.store(out_ptr + gl.program_id(1).to(gl.int64) * N + n, total.to(out_ptr.dtype.element_ty), live)


def gate_up(
    x: Scaled, w: ScaledWeights, ids: torch.Tensor, act: SwiGLU, config: RowConfig, dtype: torch.dtype, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [T k, I] in dtype, of x [T, H], few rows."""
    (_, inner2, k), bias, warps = w.gate_up.shape, w.gate_up_bias, config.gate_up_warps
    h = torch.empty(ids.numel(), inner2 // 2, dtype=dtype, device=x.data.device)
    _gate_up_kernel[(triton.cdiv(inner2 // 2, OUTPUTS.value), ids.numel())](
        x.data, x.scales, w.gate_up.data, w.gate_up.scales, h if bias is None else bias, ids, h, inner2 // 2,
        k, x.scales.shape[1], w.gate_up.scales.shape[1], ids.shape[1], warps, config.ahead, bias is not None, act.limit,
        act.alpha, act.offset, act.cubic, pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return h


def down(
    h: Scaled,
    w: ScaledWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    config: RowConfig,
    dtype: torch.dtype,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] in dtype, of h [T k, I]; must follow a launch that did not begin before ids and weights were complete."""
    (_, hidden, k), (rows, top_k), bias, warps = w.down.shape, ids.shape, w.down_bias, config.down_warps
    out = torch.empty(rows, hidden, dtype=dtype, device=h.data.device)
    _down_kernel[(triton.cdiv(hidden, OUTPUTS.value), rows)](
        h.data, h.scales, w.down.data, w.down.scales, out if bias is None else bias, out if shared is None else shared, ids,
        weights, out, 0 if shared is None else shared.stride(0), hidden,
        k, h.scales.shape[1], w.down.scales.shape[1], top_k, experts_at_once(top_k, 2 * warps), warps, config.ahead,
        bias is not None, shared is not None, pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out
