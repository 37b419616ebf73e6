"""Loads and stores of a row in decode attention, besides keys and values: lengths, prefetch of a tile to L2, the result."""

import torch
import triton
import triton.language as tl

from quire.kernels.attention.tile import COMPILED, row_lengths
from quire.kernels.triton_support.dependent_launch import prefetch
from quire.kernels.tuning.configs import DecodeConfig


@triton.jit
def load_row(
    unit_starts_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, row, num_rows, num_slots, num_tokens, max_keys,
    MAX_QUERY: tl.constexpr,
):  # fmt: skip
    """(units before the row, units of one head, first query token, queries, keys, slot): no load waits for another."""
    row = tl.minimum(row, num_rows - 1)
    row_begin = tl.load(unit_starts_ptr + row)
    head_units = tl.load(unit_starts_ptr + row + 1) - row_begin
    query_begin, query_len, seq_len = row_lengths(query_start_ptr, seq_lens_ptr, row, num_tokens, max_keys, MAX_QUERY)
    slot = tl.minimum(tl.maximum(tl.load(row_slots_ptr + row), 0), num_slots - 1)
    return row_begin, head_units, query_begin, query_len, seq_len, slot


@triton.jit
def store_rows(
    out_ptr, values, first_token, query_len, first_head, stride_token, stride_head,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Write values [ROWS, HEAD_PAD], row m = (query token m // GROUP, head m % GROUP), to out."""
    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_PAD)
    token = offs_m // GROUP
    offset = (first_token + token).to(tl.int64) * stride_token + (first_head + offs_m % GROUP) * stride_head
    mask = (token < query_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(out_ptr + offset[:, None] + offs_d[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_range(ptr, BYTES: tl.constexpr):
    """Prefetch BYTES (a power of two) from ptr on into L2."""
    if COMPILED:
        LINES: tl.constexpr = BYTES // 128 if BYTES > 128 else 1
        prefetch(ptr.to(tl.pointer_type(tl.int8)) + tl.arange(0, LINES) * 128)


@triton.jit
def prefetch_tile(
    key_ptr, value_ptr, block_row_ptr, tile, num_blocks, stride_key_block, stride_value_block,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Prefetch `prefetch_bytes` of a tile's keys and of its values. key_ptr, value_ptr: the head's entries in block 0."""
    block = tl.load(block_row_ptr + (tile * TILE) // BLOCK_SIZE)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
    token = (tile * TILE) % BLOCK_SIZE
    prefetch_range(key_ptr + block * stride_key_block + token * HEAD_DIM, BYTES)
    prefetch_range(value_ptr + block * stride_value_block + token * HEAD_DIM, BYTES)


def prefetch_bytes(k_cache: torch.Tensor, v_cache: torch.Tensor, config: DecodeConfig) -> int:
    """Bytes of a tile of keys, and of values, if they are contiguous in the cache; else 0."""
    block_size, head_dim = k_cache.shape[2:]
    tile_bytes = config.tile * head_dim * k_cache.element_size()
    dense = k_cache.stride(2) == v_cache.stride(2) == head_dim
    power_of_two = tile_bytes & (tile_bytes - 1) == 0
    return tile_bytes if dense and power_of_two and block_size >= config.tile else 0
