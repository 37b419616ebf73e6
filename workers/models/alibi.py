"""The slopes of ALiBi (Press et al., arXiv:2108.12409, section 3): a geometric sequence over the heads."""

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head. If num_heads is not a power of two, further heads take every second slope of twice as many."""
    power = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [base ** (i + 1) for i in range(power)]
    between = 2.0 ** -(2.0 ** -(math.log2(2 * power) - 3))
    return (*slopes, *(between ** (2 * i + 1) for i in range(num_heads - power)))
