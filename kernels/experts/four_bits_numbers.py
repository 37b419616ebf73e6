"""Words of `four_bits_weight` converted to numbers, for the portable kernels of experts with 4-bit weights."""

import triton
import triton.language as tl


@triton.jit
def codes(words, t: tl.constexpr):
    """Pairs of codes of stretch t, times 2^-126, in bfloat16, as bits."""
    if t == 0:
        bits = words & -2118090304  # 0x81C081C0
    elif t == 1:
        bits = (words << 3) & -2118090304
    elif t == 2:
        bits = (words << 6) & -2118090304
    else:
        bits = ((words << 1) & -2147450880) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)
    return bits


@triton.jit
def times(pairs, factors):
    """Products of pairs of bfloat16, as bits; in assembly, since the compiler would take the pairs apart."""
    asm: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [pairs, factors], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def less(pairs, others):
    """Differences of pairs of positive bfloat16, as bits, in assembly as `times`."""
    asm: tl.constexpr = "{ .reg .b32 o, m; mov.b32 o, 0x3f803f80; xor.b32 m, $2, 0x80008000; fma.rn.bf16x2 $0, $1, o, m; }"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [pairs, others], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def numbers(words, t: tl.constexpr, MX: tl.constexpr):
    """Numbers of stretch t, of even and of odd k, in float32: codes times 2^-126, or 128 + q."""
    if MX:
        bits = codes(words, t)
        low, high = (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
    else:
        bits = words >> (4 * t)
        low = (((bits << 16) & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)
        high = ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def scale_of(four, t: tl.constexpr):
    """The scale of stretch t, of four mxfp4 scales, in float32."""
    if t == 0:
        bits = four << 23
    elif t == 1:
        bits = four << 15
    elif t == 2:
        bits = four << 7
    else:
        bits = four >> 1
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_offset(s_ptr, z_ptr, at, mask, ZEROS: tl.constexpr):
    """Integers' scales s, and 128 + z."""
    scale = tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
    offset = tl.zeros_like(scale) + 136.0
    if ZEROS:
        offset = tl.load(z_ptr + at, mask, other=0).to(tl.float32) + 128.0
    return scale, offset


@triton.jit
def inputs(x_row, pair, mask):
    """x[2 pair] and x[2 pair + 1] in float32, 0 beyond the row; bfloat16 numbers are loaded in pairs."""
    if x_row.dtype.element_ty == tl.bfloat16:
        both = tl.load(x_row.to(tl.pointer_type(tl.int32)) + pair, mask, other=0)
        low, high = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    else:
        low = tl.load(x_row + 2 * pair, mask, other=0.0).to(tl.float32)
        high = tl.load(x_row + 2 * pair + 1, mask, other=0.0).to(tl.float32)
    return low, high
