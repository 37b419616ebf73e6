"""Products of one row with some experts' rows of W on mma (Gluon): shared by `pairs_row` and `four_bits_row`.

A program has OUTPUTS output columns and `streams` of them, two a warp: a stream is one expert's, or gate or up, or a split of
K, with inputs of its own. Its OUTPUTS rows of W are rows of mma's first operand and its inputs a column of the second, so each
stream's results are in its own column; the other columns are meaningless. A thread has four adjacent words of a row, 16 bytes,
and a word holds two adjacent numbers: since mma sums over K, both operands simply use the words' order of K.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.linear.int4_digits import plus
from quire.kernels.linear.int4_operands import halves

OUTPUTS = gl.constexpr(8)
WORDS = gl.constexpr(16)  # of a row that are multiplied at once: 32 of K


@gluon.constexpr_function
def bits(number: int) -> int:
    return number.bit_length() - 1


@gluon.constexpr_function
def words_layout(warps: int) -> gl.DistributedLinearLayout:
    """For words [8 * streams, 16]."""
    rows_of_warps = [[16 << i, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], rows_of_warps, [], [16 * warps, 16]
    )


@gluon.constexpr_function
def inputs_layout(warps: int) -> gl.DistributedLinearLayout:
    """For inputs [columns of mma, 16], which every warp holds: a column a stream, or 8."""
    columns = max(8, 2 * warps)
    more = [[8 << i, 0] for i in range(bits(columns) - 3)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *more], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[0, 0]] * bits(warps), [], [columns, 16]
    )


@gluon.constexpr_function
def products_layout(warps: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def operand(pairs, dtype: gl.constexpr):
    """Words [n, 16] of two 16-bit numbers each -> [n, 32], in mma's order of K."""
    low, high = halves(pairs, dtype)
    return gl.join(low, high).reshape([pairs.shape[0], 4, 2, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([pairs.shape[0], 32])


@gluon.jit
def weights_operand(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    return gl.convert_layout(operand(pairs, dtype), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def load_words(w_ptr, at, inside, MASKED: gl.constexpr):
    """16 words of each row from `at` [n] on."""
    words = w_ptr + at[:, None] + gl.arange(0, WORDS, layout=gl.SliceLayout(0, words_layout(at.shape[0] // 16)))[None, :]
    if MASKED:
        return gl.load(words, inside[:, None], other=0, eviction_policy="evict_first")
    else:
        return gl.load(words, eviction_policy="evict_first")


@gluon.jit
def load_inputs(
    x_ptr, at, pair, PAIRS: gl.constexpr, MASKED: gl.constexpr, WARPS: gl.constexpr, dtype: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """mma's second operand [32, n]: 16 pairs of numbers from `pair` on, of each column's row at `at` [n]."""
    mine = pair[:, None] + gl.arange(0, WORDS, layout=gl.SliceLayout(0, inputs_layout(WARPS)))[None, :]
    x = x_ptr.to(gl.pointer_type(gl.int32)) + at[:, None] + mine
    pairs = gl.load(x, mine < PAIRS, other=0) if MASKED else gl.load(x)
    return gl.convert_layout(operand(pairs, dtype).permute((1, 0)), gl.DotOperandLayout(1, layout, 2), assert_trivial=True)


@gluon.jit
def own(acc, layout: gl.constexpr):
    """[8 * streams] of sums [8 * streams, streams]: each stream's own column."""
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.reduce(gl.where(column[None, :] == (row // OUTPUTS)[:, None], acc, 0.0), 1, plus)


@gluon.constexpr_function
def results_layout(parts: int, warps: int) -> gl.BlockedLayout:
    """For results [parts, 8]: a thread has all parts of a column."""
    return gl.BlockedLayout([parts, 1], [1, 32], [1, warps], [1, 0])


@gluon.jit
def sum_over_splits(buffer, values, PARTS: gl.constexpr, layout: gl.constexpr):
    """[PARTS, 8] of values [8 * streams], where stream s is split s // PARTS of part s % PARTS: splits summed in order."""
    STREAMS: gl.constexpr = values.shape[0] // OUTPUTS
    buffer.store(values)
    tl.debug_barrier()
    sums = buffer._reinterpret(gl.float32, [STREAMS // PARTS, PARTS, OUTPUTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total = sums.index(0).load(layout)
    for split in gl.static_range(1, STREAMS // PARTS):
        total += sums.index(split).load(layout)
    return total


def experts_at_once(top_k: int, streams: int) -> int:
    """Experts of a row that are computed at a time: a power of two that divides top_k."""
    return min(top_k & -top_k, streams)
