"""Chunks of 128 of K of 4-bit weights for mma (Gluon): shared by `four_bits_row` and `four_bits_warp`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.experts import four_bits_numbers
from quire.kernels.experts.row_operands import WORDS, load_words

codes = gluon.jit(four_bits_numbers.codes.fn)
times = gluon.jit(four_bits_numbers.times.fn)


@gluon.constexpr_function
def span(group: int) -> int:
    """Stretches of a chunk that share one scale."""
    return 4 if group % 128 == 0 else 2 if group == 64 else 1


@gluon.jit
def load_block(
    w_ptr, s_ptr, z_ptr, w_at, s_at, total, block,
    BLOCKS: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """(words, their scales, their zero points) of a chunk; block [n]: its number in each row."""
    inside = block < BLOCKS
    words = load_words(w_ptr, w_at + block * WORDS, inside, MASKED)
    scales = ()
    zeros = ()
    if MX:
        scales = (gl.load(s_ptr + s_at + block * total, inside, other=0),)  # type: ignore[assignment]
    else:
        SPAN: gl.constexpr = span(GROUP)
        for u in gl.static_range(0, 4, SPAN):
            at = s_at + (block * 128 + 32 * u) // GROUP * total
            scales = scales + (gl.load(s_ptr + at, inside, other=0.0),)  # type: ignore[assignment]
            zeros = zeros + (gl.load(z_ptr + at, inside, other=0) if ZEROS else 8,)  # type: ignore[assignment]
    return words, scales, zeros


@gluon.jit
def less(words, zero, t: gl.constexpr):
    """q - z of stretch t, as pairs of bfloat16; q with the bits of 128 in front is 128 + q."""
    pairs = ((words >> (4 * t)) & 0x000F000F) | 0x43004300
    ASM: gl.constexpr = "sub.rn.bf16x2 $0, $1, $2;"
    offset = zero * 0x00010001 + 0x43004300
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, offset], dtype=gl.int32, is_pure=True, pack=1)
