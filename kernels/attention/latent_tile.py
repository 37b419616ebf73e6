"""The inner loop of latent attention's kernels: some queries of one sequence against a range of its cache.

A tile is BLOCK_M queries: HEADS_M heads of several tokens; keys come TILE at a time. Where rows have several tokens, tiles of
row r begin at slot query_start[r] // tokens of a tile + r, which is beyond row r - 1's last, so a grid depends on tokens and
rows alone; slots without tokens end at once. A score is the sum of two products, of the
rotated elements and of the latent, since 576 elements would be padded to 1024; the latent's tile is then also the value.
"""

import triton
import triton.language as tl


@triton.jit
def row_of_slot(starts_ptr, slot, num_rows, TOKENS_M: tl.constexpr, ROWS_BLOCK: tl.constexpr):
    """The row that the slot belongs to, if it has a tile."""
    row = -1
    for start in range(0, num_rows, ROWS_BLOCK):
        r = start + tl.arange(0, ROWS_BLOCK)
        begin = tl.load(starts_ptr + r, r < num_rows, other=0) // TOKENS_M + r
        row += tl.sum(((begin <= slot) & (r < num_rows)).to(tl.int32), 0)
    return row


@triton.jit
def attend(
    q_ptr, cache_ptr, table_ptr, tokens, heads, is_query, position, first, end, scale,
    HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, R_2: tl.constexpr, L_2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, HIDES_FIRST: tl.constexpr,
):  # fmt: skip
    """(sums [BLOCK_M, L_2], greatest [BLOCK_M], norms [BLOCK_M]) over keys [first, end); scale includes log2(e).

    HIDES_FIRST: queries behind the first token do not see its key."""
    r, j = tl.arange(0, R_2), tl.arange(0, L_2)
    q_row = q_ptr + (tokens.to(tl.int64) * HEADS + heads)[:, None] * (R + L)
    q_rotated = tl.load(q_row + r[None, :], is_query[:, None] & (r < R)[None, :], other=0.0)
    q_latent = tl.load(q_row + R + j[None, :], is_query[:, None] & (j < L)[None, :], other=0.0)
    greatest = tl.full([BLOCK_M], -1.0e30, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, L_2], tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        inside = key < end
        block = tl.load(table_ptr + key // BLOCK_SIZE, inside, other=0)
        entry = cache_ptr + (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * (R + L)
        rotated = tl.load(entry[None, :] + r[:, None], inside[None, :] & (r < R)[:, None], other=0.0)
        latent = tl.load(entry[:, None] + R + j[None, :], inside[:, None] & (j < L)[None, :], other=0.0)
        score = tl.dot(q_rotated, rotated, input_precision="ieee")
        score = tl.dot(q_latent, tl.trans(latent), score, input_precision="ieee") * scale
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if HIDES_FIRST:
            visible = visible & (key[None, :] >= tl.minimum(position, 1)[:, None])
        score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(greatest, tl.max(score, 1))
        weight = tl.exp2(score - new[:, None])
        shrink = tl.exp2(greatest - new)
        norm = norm * shrink + tl.sum(weight, 1)
        sums = tl.dot(weight.to(latent.dtype), latent, sums * shrink[:, None], input_precision="ieee")
        greatest = new
    return sums, greatest, norm
