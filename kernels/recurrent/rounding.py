"""Rounding of recurrent states to the type in which they are kept, in kernels. On the CPU and in detail: rounding_cpu."""

import triton
import triton.language as tl

from quire.kernels.recurrent import rounding_cpu as words

WEYL, FIRST, SECOND = (tl.constexpr(word) for word in (words.WEYL, words.FIRST, words.SECOND))
SHIFT, UNIT = tl.constexpr(32 - words.NOISE_BITS), tl.constexpr(0.5**words.NOISE_BITS)  # of noise
LARGEST = tl.constexpr(words.LARGEST)


@triton.jit
def rounded(state, position, element, dtype: tl.constexpr):
    """state, float32 [K, V], as dtype: float16 by chance, other types to the nearest.

    position: of the last token in the state. element: int32 [K, V], the index within the sequence's tensor.
    """
    if dtype == tl.float16:
        x = element.to(tl.uint32) + position.to(tl.uint32) * WEYL
        x = (x ^ (x >> 16)) * FIRST
        x = (x ^ (x >> 15)) * SECOND
        x = (x ^ (x >> 16)) >> SHIFT
        noise = x.to(tl.float32) * UNIT
        exponent = (state.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(exponent, 113), 142)
        steps = state * ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        below = tl.floor(steps + noise) * ((exponent - 10) << 23).to(tl.float32, bitcast=True)
        state = tl.where(tl.abs(state) < LARGEST, below, state)
    return state.to(dtype)
