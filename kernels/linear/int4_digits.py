"""A row of 16-bit numbers as integers for Hopper's tensor cores (Gluon): the operand that `int4_row` multiplies with W's bytes.

In a group of 128 the row is a power of two times integers below 2^22, which are three signed digits of 8 bits. They are stored
in shared memory in the order of mma's second operand, a digit a column, bytes in the order of `int4_weight`'s words; beside
them are the group's sums, for zero points, and its power of two. Numbers of at most 2^-22 of a group's largest are lost; an
infinity or a NaN makes all of its group NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.linear.int4_operands import halves

DIGITS = gl.constexpr(4)  # rows of an entry: three digits and an empty one


@gluon.jit
def _largest(a, b):
    return gl.maximum(a, b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def _digits(value):
    """An integer as three signed digits, the lowest first; the highest may be out of range."""
    low = (value << 24) >> 24
    rest = (value - low) >> 8
    middle = (rest << 24) >> 24
    return low, middle, (rest - middle) >> 8


@gluon.jit
def _word(a, b, c, d):
    """Four bytes of one."""
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@gluon.jit
def _wide(words, dtype: gl.constexpr):
    """Pairs of 16-bit numbers in float32."""
    low, high = halves(words, dtype)
    return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def store_row(
    pairs, x_buffer, sums_buffer, first, dtype: gl.constexpr, CHUNK: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Store lines `first` and on of x as digits, and their sums and steps. pairs: two [CHUNK, 32] words of x, 64 apart.

    Word 16 u + j of a group becomes word j of entry u, its bytes in the order of a word of W's: those of k = 32 u + 2 j, then
    64 behind it, and the two that follow these. SPLIT lines, one group of each range of K, are side by side.
    """
    a, c = _wide(pairs[0], dtype)
    b, d = _wide(pairs[1], dtype)
    bits = gl.maximum(
        gl.maximum(a.to(gl.int32, bitcast=True) & 0x7FFFFFFF, b.to(gl.int32, bitcast=True) & 0x7FFFFFFF),
        gl.maximum(c.to(gl.int32, bitcast=True) & 0x7FFFFFFF, d.to(gl.int32, bitcast=True) & 0x7FFFFFFF),
    )
    exponent = gl.maximum(gl.reduce(bits, 1, _largest) >> 23, 64)  # of the group's largest number
    # numbers below 2^22, and the digits' weights, of sixteenths
    scale = ((275 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    step = gl.where(exponent == 255, 0x7FC00000, (exponent - 25) << 23).to(gl.float32, bitcast=True)[:, None]
    a = (a * scale).to(gl.int32)
    b = (b * scale).to(gl.int32)
    c = (c * scale).to(gl.int32)
    d = (d * scale).to(gl.int32)
    a0, a1, a2 = _digits(a)
    b0, b1, b2 = _digits(b)
    c0, c1, c2 = _digits(c)
    d0, d1, d2 = _digits(d)
    none = gl.zeros([CHUNK, 32], gl.int32, layout)
    words = gl.join(gl.join(_word(a0, b0, c0, d0), _word(a2, b2, c2, d2)), gl.join(_word(a1, b1, c1, d1), none))
    # [line, 32, lower or higher digit, pair of digits] -> [block, u, stretch, digit, word]
    words = words.reshape([CHUNK // SPLIT, SPLIT, 2, 16, 2, 2]).permute((0, 2, 1, 4, 5, 3))
    three: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0])
    # Rows that mma reads together are rows of one entry, since the swizzle depends on a row's number in its entry.
    shape: gl.constexpr = [CHUNK * 2 // SPLIT, SPLIT * DIGITS, 16]
    x_buffer.index(first * 2)._reinterpret(gl.int32, shape, three).store(words.reshape(shape))

    each = a + b + c + d
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, layout))[None, :]
    total = gl.reduce(each, 1, plus)[:, None]
    upper = gl.reduce(gl.where(column >= 16, each, 0), 1, plus)[:, None]  # of the halves of words from which 8 was subtracted
    t0, t1, t2 = _digits(total)
    u0, u1, u2 = _digits(upper)
    digit = column % 4
    less = gl.where(digit == 0, t0, gl.where(digit == 1, t1, gl.where(digit == 2, t2, 0))) * -16
    more = gl.where(digit == 0, u0, gl.where(digit == 1, u1, gl.where(digit == 2, u2, 0))) * 128
    weight = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, gl.where(digit == 2, 65536.0, 0.0)))
    steps = (step * weight).to(gl.int32, bitcast=True)
    values = gl.where(column < 4, less, gl.where(column < 8, more, gl.where(column < 12, steps, 0)))
    values = values.reshape([CHUNK // SPLIT, SPLIT, 8, 4]).permute((0, 2, 1, 3)).reshape([CHUNK, 32])
    two: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums_buffer.index(first)._reinterpret(gl.int32, [CHUNK, 32], two).store(values)
