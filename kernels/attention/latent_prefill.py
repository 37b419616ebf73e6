"""Latent attention of rows with several queries: tiles of some tokens' heads against all keys before them.

Formula and shapes: `latent_reference.latent_attention`. As in decode the queries meet the latents as they lie in the cache, and
no keys or values are made: this is 3.4 times the work for a model with heads of 128 elements, and half the code. Rows before
`first_row` (a number on the device) are decode rows and are skipped.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.attention.latent_decode import LOG2E
from quire.kernels.attention.latent_tile import attend, row_of_slot

QUERIES = 64  # of a tile: tokens x heads


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _prefill_kernel(
    q_ptr, cache_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, first_row_ptr, out_ptr, table_stride, num_rows, scale,
    HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, R_2: tl.constexpr, L_2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_M: tl.constexpr, TILE: tl.constexpr, ROWS_BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr,
    HIDES_FIRST: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    tokens_m: tl.constexpr = BLOCK_M // HEADS_M
    row = row_of_slot(starts_ptr, slot, num_rows, tokens_m, ROWS_BLOCK)
    if HAS_FIRST:  # noqa: SIM102 - a constant, and then a value
        if row < tl.load(first_row_ptr):
            return
    begin = tl.load(starts_ptr + row)
    stop = tl.load(starts_ptr + row + 1)
    length = tl.load(lens_ptr + row)
    token = begin + (slot - begin // tokens_m - row) * tokens_m
    if token >= stop or length == 0:
        return
    m = tl.arange(0, BLOCK_M)
    tokens, heads = token + m // HEADS_M, tl.program_id(1) * HEADS_M + m % HEADS_M
    is_query = (tokens < stop) & (heads < HEADS)
    position = length - stop + tokens
    end = tl.minimum(length - stop + token + tokens_m, length)
    sums, _, norm = attend(
        q_ptr, cache_ptr, table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride, tokens, heads, is_query, position,
        0, end, scale, HEADS, R, L, R_2, L_2, BLOCK_SIZE, BLOCK_M, TILE, HIDES_FIRST,
    )  # fmt: skip
    j = tl.arange(0, L_2)
    out = out_ptr + (tokens.to(tl.int64) * HEADS + heads)[:, None] * L + j[None, :]
    y = (sums / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out, y, is_query[:, None] & (j < L)[None, :])


def latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    first_row: torch.Tensor | None = None,
    hides_first: bool = False,
) -> None:
    """Write out [T, Hq, L] for rows from `first_row` int32 [1] on (None: all rows). See the module.

    hides_first: queries behind a row's first token do not see its key.
    """
    heads, latent = out.shape[1:]
    rotary, exact = q.shape[2] - latent, q.dtype == torch.float32
    block_m = 16 if exact else QUERIES
    heads_m = min(block_m, triton.next_power_of_2(heads))
    slots = len(q) // (block_m // heads_m) + len(rows)
    _prefill_kernel[(slots, triton.cdiv(heads, heads_m))](
        q, cache, block_table, rows, query_start, seq_lens, rows if first_row is None else first_row, out,
        block_table.stride(0), len(rows), scale * LOG2E,
        heads, rotary, latent, max(16, triton.next_power_of_2(rotary)), max(16, triton.next_power_of_2(latent)),
        cache.shape[2], block_m, heads_m, 16 if exact else 32, 64, first_row is not None, hides_first,
        num_warps=4 if exact else 8, num_stages=2,
    )  # fmt: skip
