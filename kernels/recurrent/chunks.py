"""Parts that the kernels of prompts share: a program finds its chunk of a row from the device's metadata; those of a DeltaNet
load a chunk's keys and invert its triangular system.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import rows as words
from quire.kernels.recurrent.gates import l2_normed

CHUNK = tl.constexpr(words.CHUNK)
BLOCK = tl.constexpr(words.BLOCK)


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Upper bound of the number of chunks in a step of these padded sizes."""
    return min(num_tokens, num_tokens // words.CHUNK + num_rows)


@triton.jit
def find_chunk(query_start_ptr, limit_ptr, index, R, ROWS_2: tl.constexpr):
    """(row, number of the chunk within the row) of chunk `index` of all prompts; a row of R or more: there is no such chunk."""
    rows = tl.arange(0, ROWS_2)
    inside = rows < R
    start = tl.load(query_start_ptr + rows, inside, other=0)
    stop = tl.load(query_start_ptr + rows + 1, inside, other=0)
    counts = tl.where(inside & (rows >= tl.load(limit_ptr)), (stop - start + CHUNK - 1) // CHUNK, 0)
    row = tl.sum((tl.cumsum(counts, 0) <= index).to(tl.int32), 0)
    return row, index - tl.sum(tl.where(rows < row, counts, 0), 0)


def rows_2(rows: torch.Tensor) -> int:
    return max(16, triton.next_power_of_2(len(rows)))


@triton.jit
def normed_keys(ptr, t, stride, valid, i, eps, K: tl.constexpr):
    """A chunk's normalized queries or keys of a head, float32 [CHUNK, K_2]."""
    x = tl.load(ptr + t[:, None] * stride + i[None, :], valid[:, None] & (i < K)[None, :], other=0.0)
    return l2_normed(x.to(tl.float32), eps, 1)


@triton.jit
def l2_scales(x, eps):
    """What l2_normed multiplies each row of x by: float32 [rows] of x [rows, K_2]."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def mixed_dot(x, y, PRECISION: tl.constexpr):
    """x y with float32 sums, where one is float32. Beside bfloat16 it is split into two numbers of that type, whose 16 digits
    are 5 more than those of tf32; else both are multiplied as float32 by PRECISION.
    """
    if x.dtype == tl.bfloat16:
        high = y.to(tl.bfloat16)
        out = tl.dot(x, high) + tl.dot(x, (y - high.to(tl.float32)).to(tl.bfloat16))
    elif y.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        out = tl.dot(high, y) + tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), y)
    else:
        out = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)
    return out


@triton.jit
def unit_inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)⁻¹ of a strictly lower triangle [CHUNK, CHUNK] in float32. The blocks on the diagonal are inverted by forward
    substitution, all at once; D, their inverse, times what is below them is N, of which N⁴ is 0: (I - N) (I + N²) D.
    """
    r, c = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    own, inverse = r // BLOCK == c // BLOCK, tl.where(r == c, 1.0, 0.0)
    for i in range(BLOCK - 1):  # row i of each block is done: it is taken off the rows below
        column = tl.sum(tl.where(c == r // BLOCK * BLOCK + i, lower, 0.0), 1)
        row = tl.sum(tl.where(r == c // BLOCK * BLOCK + i, inverse, 0.0), 0)
        inverse -= tl.where(own, column[:, None] * row[None, :], 0.0)
    below = tl.dot(inverse, tl.where(own, 0.0, lower), input_precision=PRECISION)
    squared = tl.dot(below, below, input_precision=PRECISION)
    inverse += tl.dot(squared, inverse, input_precision=PRECISION)
    return inverse - tl.dot(below, inverse, input_precision=PRECISION)
