"""Scales and numbers of experts' 4-bit weights, for `four_bits_wide` (Gluon): `int4_operands` with experts, and mxfp4.

The producer prefetches a stage's scales into L2; the consumers load them a stage ahead, and apply them in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.experts import four_bits_numbers, grouped_hopper
from quire.kernels.linear.int4_operands import BLOCK_K, halves, joined, rows_of, scales_of, scales_of_block
from quire.kernels.triton_support import dependent_launch

STRIPE = grouped_hopper.STRIPE

_codes = gluon.jit(four_bits_numbers.codes.fn)
_prefetch = gluon.jit(dependent_launch.prefetch.fn)


@gluon.jit
def prefetch_scales(
    weight, expert, tile, block, N, total, k_blocks, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    STRIPES: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Prefetch the scales of a stage, which the consumers will load; a warp's lanes take rows some distance apart."""
    s_ptr, z_ptr, _factor_ptr = weight
    WIDTH: gl.constexpr = 2 * STRIPES * STRIPE // (2 if GATED else 1)  # output columns
    SCALES: gl.constexpr = 1 if MX else scales_of_block(GROUP)
    groups = k_blocks if MX else gl.cdiv(k_blocks * BLOCK_K, GROUP)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    if GATED:
        rows = gl.minimum(tile * WIDTH + lane % 16 * (WIDTH // 16), N - 1) + lane // 16 * N
    else:
        rows = gl.minimum(tile * WIDTH + lane * (WIDTH // 32), N - 1)
    for i in gl.static_range(BLOCKS * SCALES):
        group = block + i if MX else (block * BLOCK_K + i * (BLOCK_K // SCALES)) // GROUP
        at = (expert * groups + gl.minimum(group, groups - 1)) * total + rows
        _prefetch(s_ptr + at)
        if ZEROS:
            _prefetch(z_ptr + at)


@gluon.jit
def scales_of_stage(
    weight, expert, tile, block, N, k_blocks, WARPGROUP: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, STRIPES: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Scales and zeros of a warpgroup's stripes in a stage, tuples: a stripe's chunks in turn; 0 behind the last chunk."""
    s_ptr, z_ptr, _factor_ptr = weight
    total = N * 2 if GATED else N
    groups = k_blocks if MX else gl.cdiv(k_blocks * BLOCK_K, GROUP)
    first = expert.to(gl.int64) * (groups * total)
    scales = ()
    zeros = ()
    for i in gl.static_range(STRIPES):
        rows, live = rows_of((tile * 2 + WARPGROUP) * STRIPES + i, N, gl.SliceLayout(1, layout), STRIPE, GATED)
        if MX:
            for j in gl.static_range(BLOCKS):
                mask = live & (block + j < k_blocks)
                scales = scales + (gl.load(s_ptr + first + ((block + j) * total + rows), mask, other=0),)  # type: ignore[assignment]
                zeros = zeros + (0,)  # type: ignore[assignment]
        else:
            some = scales_of(s_ptr + first, z_ptr + first, rows, total, live, block, k_blocks, BLOCKS, GROUP, ZEROS)
            scales, zeros = scales + some[0], zeros + some[1]
    return scales, zeros


@gluon.jit
def _times(pairs, factors):
    """Pairs of bfloat16 times others, exact if those are powers of two."""
    both = gl.convert_layout(factors, gl.SliceLayout(1, pairs.type.layout), assert_trivial=True)[:, None]
    asm: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [pairs, both], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def mx_operand(words, four, dtype: gl.constexpr, layout: gl.constexpr):
    """A chunk's numbers [STRIPE, 128], of codes and four scales of each row."""
    pairs = ()
    for t in gl.static_range(4):
        factors = ((four >> (8 * t)) & 0xFF) * 0x00800080
        pairs = pairs + (halves(_times(_codes(words, t), factors), dtype),)  # type: ignore[assignment]
    return joined(pairs, 0, 4, layout)
