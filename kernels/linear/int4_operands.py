"""Words of a 4-bit weight as operands of Hopper's tensor cores (Gluon): shared by `int4_hopper` and `int4_wide`.

TMA copies words to shared memory as in `int4_weight`; a thread loads those that hold its part of an operand, so that a shift
and a mask make two of the operand's numbers and nothing is moved between threads. If gated, a tile has rows of the gate and of
up; those of one column are 8 apart: in one thread.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS

BLOCK_K = gl.constexpr(BLOCK)
WORDS = gl.constexpr(BLOCK_WORDS)  # of a row in a chunk
# 128 in bfloat16, 1024 in float16, twice: with q in their last bits, 128 + q and 1024 + q
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}


@gluon.constexpr_function
def scales_of_block(group: int) -> int:
    """Scales of a row in a chunk of 128 of K."""
    return max(1, BLOCK // group)


@gluon.constexpr_function
def rows_of_warps(warps: int, far: int) -> list[list[int]]:
    """Bases of a layout: the first rows of warps 1, 2, 4; consecutive warps are `far` rows apart."""
    return [[far << i, 0] for i in range(warps.bit_length() - 1)]


@gluon.jit
def load_words(buffer, block: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr):
    """A chunk's words [TILE, 16] in mma's order of W's rows; gated: 8 of the gate's and 8 of up's alternate."""
    near: gl.constexpr = 8 if not GATED else 8 * WARPS  # from a thread's first row to its second
    far: gl.constexpr = 16 if not GATED else 8  # from warp to warp
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[near, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], rows_of_warps(WARPS, far), [], [16 * WARPS, 16]
    )
    words = buffer.slice(block * WORDS, WORDS, dim=1).load(layout)
    if GATED:
        words = words.reshape([2, WARPS, 8, WORDS]).permute((1, 0, 2, 3)).reshape([16 * WARPS, WORDS])
    return words


@gluon.jit
def halves(bits, dtype: gl.constexpr):
    """Pairs of 16-bit numbers as two tensors."""
    low = (bits & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    return low, (bits >> 16).to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def numbers(words, magic, t: gl.constexpr):
    """128 (float16: 1024) + q of stretch t of a chunk: [TILE, 16] pairs."""
    return ((words >> (4 * t)) & 0x000F000F) | magic


@gluon.jit
def _of_rows(values, words):
    """A value of each row [TILE], broadcast beside its words [TILE, 16]."""
    return gl.convert_layout(values, gl.SliceLayout(1, words.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def less_zeros(words, magic, zero, t: gl.constexpr, dtype: gl.constexpr, ZEROS: gl.constexpr):
    """q - z of stretch t of a chunk, exactly: [TILE, 16] pairs; zero [TILE], without ZEROS 8.

    In assembly, since the compiler would take pairs apart if each row has its own offset.
    """
    offset = _of_rows((zero.to(gl.int32) * 0x10001) | magic, words) if ZEROS else magic + 0x00080008
    ASM: gl.constexpr = "sub.rn.bf16x2 $0, $1, $2;" if dtype == gl.bfloat16 else "sub.rn.f16x2 $0, $1, $2;"
    pairs = numbers(words, magic, t)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, offset], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def scaled(pairs, scale, dtype: gl.constexpr):
    """Pairs times their row's scale [TILE], rounded once, as two tensors of dtype."""
    if scale.dtype == dtype:
        both = (scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
        ASM: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;" if dtype == gl.bfloat16 else "mul.rn.f16x2 $0, $1, $2;"
        factor = _of_rows(both, pairs)
        return halves(gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, factor], dtype=gl.int32, is_pure=True, pack=1), dtype)
    low, high = halves(pairs, dtype)
    wide = _of_rows(scale.to(gl.float32), pairs)
    return (low.to(gl.float32) * wide).to(dtype), (high.to(gl.float32) * wide).to(dtype)


@gluon.jit
def joined(pairs, i: gl.constexpr, SPAN: gl.constexpr, layout: gl.constexpr):
    """SPAN of a chunk's four stretches, from i * SPAN on: wgmma's first operand [TILE, 32 * SPAN], without a move."""
    if SPAN == 4:
        low = gl.join(gl.join(pairs[0][0], pairs[2][0]), gl.join(pairs[1][0], pairs[3][0]))
        high = gl.join(gl.join(pairs[0][1], pairs[2][1]), gl.join(pairs[1][1], pairs[3][1]))
        both = gl.join(low, high).permute((0, 2, 3, 1, 4))
    elif SPAN == 2:
        low = gl.join(pairs[2 * i][0], pairs[2 * i + 1][0])
        high = gl.join(pairs[2 * i][1], pairs[2 * i + 1][1])
        both = gl.join(low, high).permute((0, 2, 1, 3))
    else:
        both = gl.join(pairs[i][0], pairs[i][1])
    return gl.convert_layout(both.reshape([both.shape[0], 32 * SPAN]), layout, assert_trivial=True)


@gluon.jit
def rows_of(tile, N, layout: gl.constexpr, TILE: gl.constexpr, GATED: gl.constexpr):
    """Rows of W in a tile in mma's order, and whether they exist: [TILE]."""
    i = gl.arange(0, TILE, layout=layout)
    if GATED:
        column = tile * (TILE // 2) + i // 16 * 8 + i % 8
        return column + i // 8 % 2 * N, column < N
    return tile * TILE + i, tile * TILE + i < N


@gluon.jit
def scales_of(
    s_ptr, z_ptr, rows, total, live, block, limit, BLOCKS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr
):  # fmt: skip
    """Scales and zeros of BLOCKS chunks of K of some of W's `total` rows, tuples of [TILE] in order.

    Scales are 0 from chunk `limit` on.
    """
    SCALES: gl.constexpr = scales_of_block(GROUP)
    scales = ()
    zeros = ()
    for i in gl.static_range(BLOCKS * SCALES):
        at = (block * BLOCK_K + i * (BLOCK_K // SCALES)) // GROUP * total + rows
        mask = live & (block + i // SCALES < limit)
        scales = scales + (gl.load(s_ptr + at, mask, other=0.0),)  # type: ignore[assignment]
        zeros = zeros + (gl.load(z_ptr + at, mask, other=0) if ZEROS else 0,)  # type: ignore[assignment]
    return scales, zeros


@gluon.jit
def int_operand(
    words, magic, scales, zeros, FIRST: gl.constexpr, SCALES: gl.constexpr, dtype: gl.constexpr, ZEROS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A chunk's numbers of a stripe [STRIPE, 128]; its scales and zeros are those from FIRST on."""
    pairs = ()
    for t in gl.static_range(4):
        numbers = less_zeros(words, magic, zeros[FIRST + t * SCALES // 4], t, dtype, ZEROS)
        pairs = pairs + (scaled(numbers, scales[FIRST + t * SCALES // 4], dtype),)  # type: ignore[assignment]
    return joined(pairs, 0, 4, layout)
