"""Parts that the kernels of prompts share: a program finds its chunk of a row from the device's metadata; those of a DeltaNet
load a chunk's keys and invert its triangular system.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import rows as words
from quire.kernels.recurrent.gates import l2_normed

CHUNK = tl.constexpr(words.CHUNK)


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
def unit_inverse(lower):
    """(I + lower)⁻¹ of a strictly lower triangle [CHUNK, CHUNK], by forward substitution in float32."""
    r, c = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = -lower
    for i in range(1, CHUNK):
        row = tl.sum(tl.where(r == i, inverse, 0.0), 0)
        column = tl.sum(tl.where(c == r, row[None, :], 0.0), 1)
        inverse = tl.where(r == i, (row + tl.sum(column[:, None] * inverse, 0))[None, :], inverse)
    return inverse + tl.where(r == c, 1.0, 0.0)
