"""`four_bits_row` with one warp a program, which reads 512 bytes of a row of W at once, instead of 64 bytes of eight rows.

A warp has pairs of W's rows: gate and up of a column, or two columns of `down`. A row has eight lines of mma's tile, which are
eight consecutive chunks of its K, and the columns of the inputs are the same chunks: a line's result is in its own column, and
the row's result is the sum over the lines. Inputs are loaded once for all of a warp's pairs; nothing goes through shared
memory. Operands, results and the requirements for launches are `four_bits_row`'s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.experts.row_four_bits import codes, less, load_block, span, times
from quire.kernels.experts.row_operands import WORDS, inputs_layout, load_inputs, products_layout, weights_operand, words_layout
from quire.kernels.experts.row_swiglu import activated
from quire.kernels.linear.int4_digits import plus
from quire.kernels.triton_support import dependent_launch

LINES = gl.constexpr(8)  # chunks of K that are multiplied at once

_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


@gluon.jit
def _inputs(x_ptr, x_at, step, PAIRS: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """Four operands [32, 8]: the stretches of eight chunks."""
    block = step * LINES + gl.arange(0, LINES, layout=gl.SliceLayout(1, inputs_layout(1)))
    at = gl.zeros([LINES], gl.int64, gl.SliceLayout(1, inputs_layout(1))) + x_at
    found = ()
    for t in gl.static_range(4):
        x = load_inputs(x_ptr, at, block * 64 + 16 * t, PAIRS, MASKED, 1, gl.bfloat16, layout)
        found = found + (x,)  # type: ignore[assignment]
    return found


@gluon.jit
def _multiply(acc, loaded, x, GROUP: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, layout: gl.constexpr):
    """acc [16, 8] plus the products of eight chunks of two rows."""
    words, scales, zeros = loaded
    SPAN: gl.constexpr = 1 if MX else span(GROUP)
    for u in gl.static_range(0, 4, SPAN):
        part = gl.zeros([16, 8], gl.float32, layout)
        for t in gl.static_range(u, u + SPAN):
            if MX:
                factor = ((scales[0] >> (8 * t)) & 0xFF) * 0x00800080
                acc = mma_v2(weights_operand(times(codes(words, t), factor[:, None]), gl.bfloat16, layout), x[t], acc)
            else:
                zero = zeros[u // SPAN].to(gl.int32)[:, None] if ZEROS else gl.full([1, 1], 8, gl.int32, words.type.layout)
                part = mma_v2(weights_operand(less(words, zero, t), gl.bfloat16, layout), x[t], part)
        if not MX:
            scale = gl.convert_layout(scales[u // SPAN].to(gl.float32), gl.SliceLayout(1, layout), assert_trivial=True)
            acc = acc + part * scale[:, None]
    return acc


@gluon.jit
def _sums(acc, layout: gl.constexpr):
    """The results of both rows, of acc [16, 8]."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    own = gl.reduce(gl.where(column[None, :] == (row % LINES)[:, None], acc, 0.0), 1, plus)
    first = gl.reduce(gl.where(row < LINES, own, 0.0), 0, plus)
    return first, gl.reduce(gl.where(row < LINES, 0.0, own), 0, plus)


@gluon.jit
def gate_up_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, ids_ptr, out_ptr, x_stride, N,
    K: gl.constexpr, ROW_WORDS: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ROW_PAIRS: gl.constexpr, AHEAD: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, p): ROW_PAIRS columns c of pair p. x_stride in pairs."""
    layout: gl.constexpr = products_layout(1)
    BLOCKS: gl.constexpr = ROW_WORDS // WORDS
    STEPS: gl.constexpr = (BLOCKS + LINES - 1) // LINES
    MASKED: gl.constexpr = BLOCKS % LINES != 0
    ALL: gl.constexpr = STEPS * ROW_PAIRS
    first_n = gl.program_id(0) * ROW_PAIRS
    pair = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, words_layout(1)))
    line = row % LINES
    _wait_for_previous(PDL)
    expert = gl.load(ids_ptr + pair).to(gl.int64)
    w_n = ()
    for c in gl.static_range(ROW_PAIRS):
        w_n = w_n + (row // LINES * N + gl.minimum(first_n + c, N - 1),)  # type: ignore[assignment]
    loaded = ()
    for i in gl.static_range(min(AHEAD, ALL)):
        w_at = (expert * 2 * N + w_n[i % ROW_PAIRS]) * ROW_WORDS
        s_at = expert * SCALES * 2 * N + w_n[i % ROW_PAIRS]
        block = i // ROW_PAIRS * LINES + line
        more = load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, 2 * N, block, BLOCKS, MASKED, GROUP, MX, ZEROS)
        loaded = loaded + (more,)  # type: ignore[assignment]
    sums = ()
    for _ in gl.static_range(ROW_PAIRS):
        sums = sums + (gl.zeros([16, 8], gl.float32, layout),)  # type: ignore[assignment]
    X_MASKED: gl.constexpr = MASKED or K % 128 != 0
    for step in gl.static_range(STEPS):
        x = _inputs(x_ptr, pair // TOP_K * x_stride, step, K // 2, X_MASKED, layout)
        added = ()
        for c in gl.static_range(ROW_PAIRS):
            acc = _multiply(sums[c], loaded[step * ROW_PAIRS + c], x, GROUP, MX, ZEROS, layout)
            added = added + (acc,)  # type: ignore[assignment]
            if step * ROW_PAIRS + c + AHEAD < ALL:
                w_at = (expert * 2 * N + w_n[(c + AHEAD) % ROW_PAIRS]) * ROW_WORDS
                s_at = expert * SCALES * 2 * N + w_n[(c + AHEAD) % ROW_PAIRS]
                block = (step * ROW_PAIRS + c + AHEAD) // ROW_PAIRS * LINES + line
                more = load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, 2 * N, block, BLOCKS, MASKED, GROUP, MX, ZEROS)
                loaded = loaded + (more,)  # type: ignore[assignment]
        sums = added
    for c in gl.static_range(ROW_PAIRS):
        gate, up = _sums(sums[c], layout)
        n = gl.minimum(first_n + c, N - 1)
        at = expert * 2 * N + n
        if MX:
            gate *= gl.load(factor_ptr + at)
            up *= gl.load(factor_ptr + at + N)
        if BIAS:
            gate += gl.load(bias_ptr + at).to(gl.float32)
            up += gl.load(bias_ptr + at + N).to(gl.float32)
        h = activated(gate, up, out_ptr.dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC)
        gl.store(out_ptr + pair * N + n, h.to(out_ptr.dtype.element_ty))


@gluon.jit
def down_kernel(
    h_ptr, w_ptr, s_ptr, z_ptr, factor_ptr, bias_ptr, shared_ptr, ids_ptr, weights_ptr, out_ptr, shared_stride, N,
    K: gl.constexpr, ROW_WORDS: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ROW_PAIRS: gl.constexpr, AHEAD: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (c, t): ROW_PAIRS pairs of columns c of row t, for all its experts."""
    layout: gl.constexpr = products_layout(1)
    BLOCKS: gl.constexpr = ROW_WORDS // WORDS
    STEPS: gl.constexpr = (BLOCKS + LINES - 1) // LINES
    MASKED: gl.constexpr = BLOCKS % LINES != 0
    EACH: gl.constexpr = STEPS * ROW_PAIRS  # steps of an expert
    ALL: gl.constexpr = TOP_K * EACH
    first_n = gl.program_id(0) * (2 * ROW_PAIRS)
    first_pair = gl.program_id(1).to(gl.int64) * TOP_K
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, words_layout(1)))
    line = row % LINES
    w_n = ()
    for c in gl.static_range(ROW_PAIRS):
        w_n = w_n + (gl.minimum(first_n + 2 * c + row // LINES, N - 1),)  # type: ignore[assignment]
    experts = ()
    for j in gl.static_range(TOP_K):
        experts = experts + (gl.load(ids_ptr + first_pair + j).to(gl.int64),)  # type: ignore[assignment]
    loaded = ()
    for i in gl.static_range(min(AHEAD, ALL)):
        w_at = (experts[i // EACH] * N + w_n[i % ROW_PAIRS]) * ROW_WORDS
        s_at = experts[i // EACH] * SCALES * N + w_n[i % ROW_PAIRS]
        block = i % EACH // ROW_PAIRS * LINES + line
        more = load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, N, block, BLOCKS, MASKED, GROUP, MX, ZEROS)
        loaded = loaded + (more,)  # type: ignore[assignment]
    _wait_for_previous(PDL)
    X_MASKED: gl.constexpr = MASKED or K % 128 != 0
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    totals = ()
    for c in gl.static_range(2 * ROW_PAIRS):
        total = gl.to_tensor(0.0)
        if SHARED:
            n = gl.minimum(first_n + c, N - 1)
            total = gl.load(shared_ptr + gl.program_id(1).to(gl.int64) * shared_stride + n).to(gl.float32)
        totals = totals + (total,)  # type: ignore[assignment]
    for j in gl.static_range(TOP_K):
        sums = ()
        for _ in gl.static_range(ROW_PAIRS):
            sums = sums + (gl.zeros([16, 8], gl.float32, layout),)  # type: ignore[assignment]
        for step in gl.static_range(STEPS):
            x = _inputs(h_ptr, (first_pair + j) * (K // 2), step, K // 2, X_MASKED, layout)
            added = ()
            for c in gl.static_range(ROW_PAIRS):
                added = added + (_multiply(sums[c], loaded[j * EACH + step * ROW_PAIRS + c], x, GROUP, MX, ZEROS, layout),)  # type: ignore[assignment]
                if j * EACH + step * ROW_PAIRS + c + AHEAD < ALL:
                    w_at = (
                        experts[(j * EACH + step * ROW_PAIRS + c + AHEAD) // EACH] * N + w_n[(c + AHEAD) % ROW_PAIRS]
                    ) * ROW_WORDS
                    s_at = (
                        experts[(j * EACH + step * ROW_PAIRS + c + AHEAD) // EACH] * SCALES * N + w_n[(c + AHEAD) % ROW_PAIRS]
                    )
                    block = (j * EACH + step * ROW_PAIRS + c + AHEAD) % EACH // ROW_PAIRS * LINES + line
                    more = load_block(w_ptr, s_ptr, z_ptr, w_at, s_at, N, block, BLOCKS, MASKED, GROUP, MX, ZEROS)
                    loaded = loaded + (more,)  # type: ignore[assignment]
            sums = added
        weight = gl.load(weights_ptr + first_pair + j)
        summed = ()
        for c in gl.static_range(2 * ROW_PAIRS):
            y = _sums(sums[c // 2], layout)[c % 2]
            at = experts[j] * N + gl.minimum(first_n + c, N - 1)
            if MX:
                y *= gl.load(factor_ptr + at)
            if BIAS:
                y += gl.load(bias_ptr + at).to(gl.float32)
            summed = summed + (totals[c] + y.to(dtype).to(gl.float32) * weight,)  # type: ignore[assignment]
        totals = summed
    for c in gl.static_range(2 * ROW_PAIRS):
        n = gl.minimum(first_n + c, N - 1)
        gl.store(out_ptr + gl.program_id(1).to(gl.int64) * N + n, totals[c].to(dtype))
