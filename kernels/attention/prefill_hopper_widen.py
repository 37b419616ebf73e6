"""The producer of Hopper's prefill attention for 8-bit caches: four warps, which also widen keys and values.

TMA copies one tile of keys and one of values at a time as they lie in the cache; the warps widen it, exactly, to the queries'
type and write it to the ring from which the consumers multiply. Products stay 16-bit: Hopper accumulates 8-bit products with
too few bits for long contexts. While the warps widen keys, the tile of values is being copied, and vice versa. Queries and
records are as in prefill_hopper_producer.py.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.attention.prefill_hopper_producer import (
    FIRST_POSITION,
    copy_tile,
    next_unit,
    write_last_record,
    write_unit,
)

LINES = gl.constexpr(16)  # lines of a tile that are widened at a time


@gluon.jit
def _widen(
    raw, full, empty, ready, buffer, step, first_line, end_line, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Widen tile `step` of keys or values from `raw` [TILE, D], once it is there, into its stage of the ring, once that is
    free.

    Lines before first_line (None: there are none) and from end_line on become 0: behind the row's last key and outside its
    window a value may be anything, NaN too.
    """
    HEAD_PAD: gl.constexpr = raw.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 * 16 // HEAD_PAD, HEAD_PAD // 16], [4, 1], [1, 0])
    stage = step % STAGES
    mbarrier.wait(full, step & 1)
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(TILE // LINES):
        values = raw.slice(i * LINES, LINES).load(layout).to(buffer.dtype)
        values = gl.where((i * LINES + lines < end_line)[:, None], values, 0.0)
        if first_line is not None:
            values = gl.where((i * LINES + lines >= first_line)[:, None], values, 0.0)
        buffer.index(stage).slice(i * LINES, LINES).store(values)
    fence_async_shared()
    tl.debug_barrier()  # all four warps have read the tile and written theirs
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def produce_widened(
    descs, shared, raw_tiles, step_pointers, window,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`produce` with four warps; raw_tiles: 8-bit keys and values [TILE, D] on their way, and a full barrier for each."""
    (
        block_table_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, header_ptr, tile_rows_ptr, tile_indices_ptr,
        counters_ptr, num_slots, num_blocks, num_tokens, max_keys, stride_table,
    ) = step_pointers  # fmt: skip
    q_desc, key_desc, value_desc = descs
    q_buffer, key_buffer, value_buffer, records, q_full, q_empty, key_full, key_empty, value_full, value_empty = shared
    raw_keys, raw_values, raw_key_full, raw_value_full = raw_tiles
    PARTS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    num_programs = gl.num_programs(0)
    splits = gl.load(header_ptr + 1)
    num_units = gl.load(header_ptr) * (NUM_KV_HEADS * PARTS) * splits
    unit = gl.program_id(0)
    turn = 0
    step = 0
    while unit < num_units:
        kv_head, block_row_ptr, seq_len, end_key, tile_begin, tile_end, fields = next_unit(
            unit, splits, tile_rows_ptr, tile_indices_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, block_table_ptr,
            num_slots, num_tokens, max_keys, stride_table, window, NUM_KV_HEADS, PARTS, TOKENS, TILE,
        )  # fmt: skip
        first_key = None
        if window is not None:
            first_key = gl.maximum(fields[FIRST_POSITION] - window + 1, 0)
        unit = gl.atomic_add(counters_ptr, 1, sem="relaxed") + num_programs
        if tile_begin < tile_end:  # else the row is too short for this split
            write_unit(q_desc, q_buffer, records, q_full, q_empty, turn, fields, GROUP, HEADS, TOKENS, HEAD_DIM, 4)
            turn += 1
            tile = tile_end - 1
            copy_tile(
                key_desc, raw_keys, raw_key_full, block_row_ptr, tile, first_key, end_key, num_blocks, kv_head, NUM_KV_HEADS,
                BLOCK_SIZE, TILE,
            )  # fmt: skip
            valid_keys = seq_len - tile * TILE
            while tile >= tile_begin:
                copy_tile(
                    value_desc, raw_values, raw_value_full, block_row_ptr, tile, first_key, end_key, num_blocks, kv_head,
                    NUM_KV_HEADS, BLOCK_SIZE, TILE,
                )  # fmt: skip
                _widen(raw_keys, raw_key_full, key_empty, key_full, key_buffer, step, None, TILE, TILE, STAGES)
                if tile > tile_begin:
                    copy_tile(
                        key_desc, raw_keys, raw_key_full, block_row_ptr, tile - 1, first_key, end_key, num_blocks, kv_head,
                        NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                first_line = None
                if window is not None:
                    first_line = first_key - tile * TILE
                _widen(
                    raw_values, raw_value_full, value_empty, value_full, value_buffer, step, first_line, valid_keys,
                    TILE, STAGES,
                )  # fmt: skip
                valid_keys = TILE
                step += 1
                tile -= 1
    write_last_record(records, q_full, q_empty, counters_ptr, turn, num_programs, q_buffer.shape[0], 4)
