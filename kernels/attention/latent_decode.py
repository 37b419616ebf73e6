"""Latent attention of rows with one query or a few: split over keys (split-K), then combined.

Formula and shapes: `latent_reference.latent_attention`. A program takes up to 64 heads of one row and an equal share of its
keys, in whole tiles. All heads read the same entries. The number of splits depends on the number of rows alone, so that the
grid can be captured; empty splits of short rows end at once. Rows from `limit` on (a number on the device) are left out: they
are not decode rows. Moves a row's entries once for every 64 heads, and 4 L bytes for each partial sum.

If rows may have several queries, the heads of several are packed into a tile of 64 (`latent_tile` lays tiles out). The rows of
such a step are padded to the number of its samples, so there are at least as many as decode tokens, or the caller says how many
of these there may be: partial sums have places by token, and the number of splits is that of as many rows with one query.
"""

import math

import torch
import triton
import triton.language as tl

from quire.kernels.attention.latent_tile import attend, row_of_slot
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

MAX_HEADS = 64  # of a program
MAX_PARTS = 32
FEW_PARTS = 8  # up to this many splits, the combining kernel is compiled for no more than these
COMBINED = 2048  # elements that a program combines
PROGRAMS = 264  # enough to fill a GPU
ROWS_BLOCK = 64  # rows that are searched at once for that of a tile
LOG2E = math.log2(math.e)


def num_splits(rows: int, heads: int) -> int:
    """The number of splits of each row's keys, a power of two."""
    programs = rows * triton.cdiv(heads, MAX_HEADS)
    return min(MAX_PARTS, triton.next_power_of_2(max(1, PROGRAMS // programs)))


@triton.jit(do_not_specialize=["parts", "table_stride"])
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, limit_ptr, out_ptr, partial_ptr, lse_ptr,
    table_stride, parts, scale,
    HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, R_2: tl.constexpr, L_2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, HIDES_FIRST: tl.constexpr, HAS_LIMIT: tl.constexpr, IN_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_for_previous(PDL)
    if HAS_LIMIT:  # noqa: SIM102 - a constant, and then a value
        if row >= tl.load(limit_ptr):
            return
    length = tl.load(lens_ptr + row)
    if length == 0:
        return
    token = tl.load(starts_ptr + row + 1) - 1
    table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    each = tl.cdiv(tl.cdiv(length, parts), TILE) * TILE
    first = part * each
    end = tl.minimum(first + each, length)
    is_query = heads < HEADS
    tokens = token + tl.zeros([BLOCK_M], tl.int32)
    sums, greatest, norm = attend(
        q_ptr, cache_ptr, table, tokens, heads, is_query, tl.zeros([BLOCK_M], tl.int32) + length - 1, first, end, scale,
        HEADS, R, L, R_2, L_2, BLOCK_SIZE, BLOCK_M, TILE, HIDES_FIRST,
    )  # fmt: skip
    j = tl.arange(0, L_2)
    mask = is_query[:, None] & (j < L)[None, :]
    if IN_PARTS:
        at = (row.to(tl.int64) * parts + part) * HEADS + heads
        tl.store(lse_ptr + at, tl.where(norm > 0, greatest + tl.log2(tl.maximum(norm, 1e-30)), float("-inf")), is_query)
        if first < end:
            tl.store(partial_ptr + at[:, None] * L + j[None, :], sums / norm[:, None], mask)
    else:
        at = token.to(tl.int64) * HEADS + heads
        tl.store(out_ptr + at[:, None] * L + j[None, :], (sums / norm[:, None]).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "parts", "table_stride"])
def _several_kernel(
    q_ptr, cache_ptr, table_ptr, rows_ptr, starts_ptr, lens_ptr, limit_ptr, out_ptr, partial_ptr, lse_ptr,
    table_stride, num_rows, num_tokens, parts, scale,
    HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, R_2: tl.constexpr, L_2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_M: tl.constexpr, TILE: tl.constexpr, ROWS_BLOCK: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HIDES_FIRST: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (slot, h, part): HEADS_M heads of the slot's tokens, all of one row."""
    slot, part = tl.program_id(0), tl.program_id(2)
    tokens_m: tl.constexpr = BLOCK_M // HEADS_M
    wait_for_previous(PDL)
    row = row_of_slot(starts_ptr, slot, num_rows, tokens_m, ROWS_BLOCK)
    if HAS_LIMIT:  # noqa: SIM102 - a constant, and then a value
        if row >= tl.load(limit_ptr):
            return
    begin = tl.load(starts_ptr + row)
    stop = tl.minimum(tl.load(starts_ptr + row + 1), num_tokens)  # tokens beyond have no places, and are not decode tokens
    length = tl.load(lens_ptr + row)
    token = begin + (slot - begin // tokens_m - row) * tokens_m
    if token >= stop or length == 0:
        return
    m = tl.arange(0, BLOCK_M)
    tokens, heads = token + m // HEADS_M, tl.program_id(1) * HEADS_M + m % HEADS_M
    is_query = (tokens < stop) & (heads < HEADS)
    position = length - stop + tokens
    each = tl.cdiv(tl.cdiv(length, parts), TILE) * TILE
    first = part * each
    end = tl.minimum(first + each, length)
    table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    sums, greatest, norm = attend(
        q_ptr, cache_ptr, table, tokens, heads, is_query, position, first, end, scale,
        HEADS, R, L, R_2, L_2, BLOCK_SIZE, BLOCK_M, TILE, HIDES_FIRST,
    )  # fmt: skip
    j = tl.arange(0, L_2)
    mask = is_query[:, None] & (j < L)[None, :]
    if IN_PARTS:
        at = (tokens.to(tl.int64) * parts + part) * HEADS + heads
        seen = norm > 0  # a split may begin behind a query
        tl.store(lse_ptr + at, tl.where(seen, greatest + tl.log2(tl.maximum(norm, 1e-30)), float("-inf")), is_query)
        values = sums / tl.where(seen, norm, 1.0)[:, None]
        tl.store(partial_ptr + at[:, None] * L + j[None, :], values, mask & seen[:, None])
    else:
        at = tokens.to(tl.int64) * HEADS + heads
        tl.store(out_ptr + at[:, None] * L + j[None, :], (sums / norm[:, None]).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows", "parts"])
def _combine_several_kernel(
    partial_ptr, lse_ptr, starts_ptr, limit_ptr, out_ptr, num_rows, parts,
    HEADS: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, PARTS_2: tl.constexpr, HAS_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, h, c): BLOCK_L elements of a head's result for a token; it loads all splits of them at once."""
    token, head = tl.program_id(0), tl.program_id(1)
    j, part = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, PARTS_2)
    wait_for_previous(PDL)
    rows = num_rows
    if HAS_LIMIT:
        rows = tl.minimum(tl.load(limit_ptr), num_rows)
    if token >= tl.load(starts_ptr + rows):
        return
    at = (token.to(tl.int64) * parts + part) * HEADS + head
    lse = tl.load(lse_ptr + at, part < parts, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    # the sums of a split without keys were never written
    mask = (weight > 0)[:, None] & (j < L)[None, :]
    sums = tl.load(partial_ptr + at[:, None] * L + j[None, :], mask, other=0.0)
    out = tl.sum(weight[:, None] * sums, 0) / tl.sum(weight, 0)
    tl.store(out_ptr + (token.to(tl.int64) * HEADS + head) * L + j, out.to(out_ptr.dtype.element_ty), j < L)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    partial_ptr, lse_ptr, starts_ptr, lens_ptr, limit_ptr, out_ptr, parts,
    HEADS: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, PARTS_2: tl.constexpr, HAS_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, h, c): BLOCK_L elements of a head's result; it loads all splits of them at once."""
    row, head = tl.program_id(0), tl.program_id(1)
    j, part = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, PARTS_2)
    wait_for_previous(PDL)
    if HAS_LIMIT:  # noqa: SIM102 - a constant, and then a value
        if row >= tl.load(limit_ptr):
            return
    if tl.load(lens_ptr + row) == 0:
        return
    at = (row.to(tl.int64) * parts + part) * HEADS + head
    lse = tl.load(lse_ptr + at, part < parts, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    # an empty split's sums were never written
    mask = (weight > 0)[:, None] & (j < L)[None, :]
    sums = tl.load(partial_ptr + at[:, None] * L + j[None, :], mask, other=0.0)
    out = tl.sum(weight[:, None] * sums, 0) / tl.sum(weight, 0)
    token = (tl.load(starts_ptr + row + 1) - 1).to(tl.int64)
    tl.store(out_ptr + (token * HEADS + head) * L + j, out.to(out_ptr.dtype.element_ty), j < L)


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    limit: torch.Tensor | None = None,
    max_query_len: int = 1,
    max_tokens: int = 0,
    hides_first: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Write out [T, Hq, L] for rows with up to max_query_len queries, the first `limit` int32 [1] of them (None: all).

    With max_query_len > 1 these rows' tokens come first, and there are at most max_tokens of them (0: as many as rows [R],
    padding included). hides_first: queries behind a row's first token do not see its key.
    """
    heads, latent = out.shape[1:]
    rotary, count = q.shape[2] - latent, max_tokens if max_query_len > 1 and max_tokens else len(rows)
    parts = num_splits(count, heads)
    block_m = max(16, min(MAX_HEADS, triton.next_power_of_2(heads)))
    exact = q.dtype == torch.float32
    block_m = 16 if exact else block_m
    partial = lse = out
    if parts > 1:
        partial = torch.empty(count, parts, heads, latent, dtype=torch.float32, device=q.device)
        lse = torch.empty(count, parts, heads, dtype=torch.float32, device=q.device)
    latent_2 = max(16, triton.next_power_of_2(latent))
    has_limit, options = limit is not None, launch_options(pdl)
    tensors = (q, cache, block_table, rows, query_start, seq_lens, limit if has_limit else rows, out, partial, lse)
    sizes = (heads, rotary, latent, max(16, triton.next_power_of_2(rotary)), latent_2, cache.shape[2])
    if max_query_len > 1:
        block_m = 16 if exact else MAX_HEADS
        heads_m = min(block_m, triton.next_power_of_2(heads))
        slots = count // (block_m // heads_m) + len(rows)
        _several_kernel[(slots, triton.cdiv(heads, heads_m), parts)](
            *tensors, block_table.stride(0), len(rows), count, parts, scale * LOG2E,
            *sizes, block_m, heads_m, 16 if exact else 32, ROWS_BLOCK, has_limit, hides_first, parts > 1, pdl,
            num_warps=4 if exact else 8, num_stages=2, **options,
        )  # fmt: skip
    else:
        _decode_kernel[(count, triton.cdiv(heads, block_m), parts)](
            *tensors, block_table.stride(0), parts, scale * LOG2E,
            *sizes, block_m, 16 if exact else 64 if block_m <= 32 else 32, hides_first, has_limit, parts > 1, pdl,
            num_warps=4 if block_m <= 16 else 8, num_stages=2, **options,
        )  # fmt: skip
    if parts > 1:
        # mixed steps (with a limit) may have any number of rows: one compiled kernel serves them all
        parts_2 = MAX_PARTS if has_limit or parts > FEW_PARTS else FEW_PARTS
        block_l = min(COMBINED // parts_2, latent_2)
        if max_query_len > 1:
            _combine_several_kernel[(count, heads, triton.cdiv(latent, block_l))](
                partial, lse, query_start, limit if has_limit else rows, out, len(rows), parts,
                heads, latent, block_l, parts_2, has_limit, pdl, num_warps=4, **options,
            )  # fmt: skip
            return
        _combine_kernel[(count, heads, triton.cdiv(latent, block_l))](
            partial, lse, query_start, seq_lens, limit if limit is not None else rows, out, parts,
            heads, latent, block_l, parts_2, has_limit, pdl, num_warps=4, **options,
        )  # fmt: skip
