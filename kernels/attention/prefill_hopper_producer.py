"""The producer of Hopper's prefill attention: one warp that has TMA copy queries, keys and values, two tiles ahead.

The copies go to rings in shared memory: Q has two stages, each with its unit's record; K and V have STAGES stages of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.triton_support import tma

_copy = tma.copy

# The record of a unit, which the producer writes beside its queries:
NUM_FIELDS = gl.constexpr(8)
TILE_END = gl.constexpr(0)  # KV tiles [TILE_BEGIN, TILE_END); 0: there are no more units
FIRST_POSITION = gl.constexpr(1)  # of the tile's first query
END_KEY = gl.constexpr(2)  # keys that the tile's last query sees
FIRST_TOKEN = gl.constexpr(3)  # of the step
LIVE_TOKENS = gl.constexpr(4)  # the row's tokens in the tile, of TOKENS
KV_HEAD = gl.constexpr(5)  # the KV head's number times PARTS, plus the part of its group
TILE_BEGIN = gl.constexpr(6)
WHOLE_UNIT = gl.constexpr(7)  # number of the (query tile, KV head), of which the keys may be split


@gluon.jit
def read_field(records, stage, field: gl.constexpr):
    """A field as a scalar, for all four warps of a consumer."""
    return gl.max(records.index(stage * NUM_FIELDS + field).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _write_field(records, stage, field: gl.constexpr, value, WARPS: gl.constexpr):
    """Executed by each of WARPS warps; records int32 [2 * NUM_FIELDS, 1], for the two stages of Q."""
    records.index(stage * NUM_FIELDS + field).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def copy_tile(
    desc, buffer, full, block_row_ptr, tile, first_key, end_key, num_blocks, kv_head,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of keys or values, block by block; a block that no query sees is replaced by one that is seen.

    The queries see keys from first_key (None: there is no window) to end_key - 1.
    """
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    mbarrier.expect(full, TILE * desc.block_type.shape[1] * desc.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(TILE // BOX):
        key = tile * TILE + i * BOX
        key = gl.where(key < end_key, key, tile * TILE)
        if first_key is not None and BOX < TILE:
            key = gl.maximum(key, first_key // BOX * BOX)
        block = gl.load(block_row_ptr + key // BLOCK_SIZE)
        block = gl.minimum(gl.maximum(block, 0), num_blocks - 1)
        line = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        _copy(desc, [line, 0], full, buffer.slice(i * BOX, BOX))


@gluon.jit
def next_unit(
    unit, splits, tile_rows_ptr, tile_indices_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, block_table_ptr,
    num_slots, num_tokens, max_keys, stride_table, window,
    NUM_KV_HEADS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """(KV head, the row's block table, its keys, keys that the last query sees, KV tiles [begin, end), the unit's record)."""
    whole_unit = unit // splits
    split = unit % splits
    entry = whole_unit // (NUM_KV_HEADS * PARTS)
    kv_head = whole_unit % (NUM_KV_HEADS * PARTS)
    row = gl.load(tile_rows_ptr + entry)
    first_token = gl.load(tile_indices_ptr + entry) * TOKENS
    begin = gl.minimum(gl.maximum(gl.load(query_start_ptr + row), 0), num_tokens)
    query_len = gl.minimum(gl.maximum(gl.load(query_start_ptr + row + 1), begin), num_tokens) - begin
    seq_len = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + row), 0), max_keys)
    slot = gl.minimum(gl.maximum(gl.load(row_slots_ptr + row), 0), num_slots - 1)
    block_row_ptr = block_table_ptr + slot.to(gl.int64) * stride_table
    first_position = gl.maximum(seq_len - query_len + first_token, 0)
    live = gl.minimum(TOKENS, query_len - first_token)
    end_key = gl.minimum(first_position + live, seq_len)
    key_tiles = gl.cdiv(end_key, TILE)
    if window is not None:
        first_tile = gl.maximum(first_position - window + 1, 0) // TILE
        key_tiles -= first_tile
    split_tiles = gl.cdiv(key_tiles, splits)
    tile_begin = split * split_tiles
    if window is not None:
        tile_begin += first_tile
    tile_end = gl.minimum(tile_begin + split_tiles, gl.cdiv(end_key, TILE))
    fields = (tile_end, first_position, end_key, begin + first_token, live, kv_head, tile_begin, whole_unit)
    return kv_head // PARTS, block_row_ptr, seq_len, end_key, tile_begin, tile_end, fields


@gluon.jit
def write_unit(
    q_desc, q_buffer, records, q_full, q_empty, turn, fields,
    GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write a unit's record and start the copy of its queries, as soon as a stage of Q is free.

    In the last part of a group, lines beyond the group's heads are copied too: they hold another group's heads, or 0.
    """
    PARTS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    BOX: gl.constexpr = q_desc.block_type.shape[0]
    q_stage = turn % q_buffer.shape[0]
    mbarrier.wait(q_empty.index(q_stage), (turn // q_buffer.shape[0] & 1) ^ 1)
    for field in gl.static_range(NUM_FIELDS):
        _write_field(records, q_stage, field, fields[field], WARPS)
    first_line, kv_head = fields[FIRST_TOKEN], fields[KV_HEAD]
    first_head = kv_head // PARTS * GROUP + kv_head % PARTS * HEADS
    mbarrier.expect(q_full.index(q_stage), HEADS * TOKENS * q_buffer.shape[2] * q_desc.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(HEADS * TOKENS // BOX):
        _copy(
            q_desc, [first_line + box * BOX % TOKENS, (first_head + box * BOX // TOKENS) * HEAD_DIM], q_full.index(q_stage),
            q_buffer.index(q_stage).slice(box * BOX, BOX),
        )  # fmt: skip


@gluon.jit
def write_last_record(records, q_full, q_empty, counters_ptr, turn, num_programs, Q_STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Write the record "no more units". The last program to finish resets the counters to 0 for the next launch."""
    q_stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(q_stage), (turn // Q_STAGES & 1) ^ 1)
    _write_field(records, q_stage, TILE_END, 0, WARPS)
    mbarrier.arrive(q_full.index(q_stage), count=1)
    finished = gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if finished == num_programs - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def produce(
    descs, shared, value_copied, step_pointers, window,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: takes units until none are left; for each, the record and Q, then K and V from the last tile to the first.

    A full barrier completes when a stage's copy has arrived, an empty one when both consumers have read it.
    """
    (
        block_table_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, header_ptr, tile_rows_ptr, tile_indices_ptr,
        counters_ptr, num_slots, num_blocks, num_tokens, max_keys, stride_table,
    ) = step_pointers  # fmt: skip
    q_desc, key_desc, value_desc = descs
    q_buffer, key_buffer, value_buffer, records, q_full, q_empty, key_full, key_empty, value_full, value_empty = shared
    PARTS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    HEAD_PAD: gl.constexpr = q_buffer.shape[2]
    num_programs = gl.num_programs(0)
    splits = gl.load(header_ptr + 1)
    num_units = gl.load(header_ptr) * (NUM_KV_HEADS * PARTS) * splits
    unit = gl.program_id(0)
    turn = 0
    step = 0
    copies = 0
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
            write_unit(q_desc, q_buffer, records, q_full, q_empty, turn, fields, GROUP, HEADS, TOKENS, HEAD_DIM, 1)
            turn += 1
            tile = tile_end - 1

            stage = step % STAGES
            mbarrier.wait(key_empty.index(stage), (step // STAGES & 1) ^ 1)
            copy_tile(
                key_desc, key_buffer.index(stage), key_full.index(stage), block_row_ptr, tile, first_key, end_key, num_blocks,
                kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
            )  # fmt: skip
            # Behind the row's last key a value may be anything, NaN too, and 0 * NaN would pass through the product with V.
            valid_keys = seq_len - tile * TILE
            while tile >= tile_begin:
                if tile > tile_begin:
                    next_stage = (step + 1) % STAGES
                    mbarrier.wait(key_empty.index(next_stage), ((step + 1) // STAGES & 1) ^ 1)
                    copy_tile(
                        key_desc, key_buffer.index(next_stage), key_full.index(next_stage), block_row_ptr, tile - 1, first_key,
                        end_key, num_blocks, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                stage = step % STAGES
                mbarrier.wait(value_empty.index(stage), (step // STAGES & 1) ^ 1)
                if valid_keys >= TILE:
                    copy_tile(
                        value_desc, value_buffer.index(stage), value_full.index(stage), block_row_ptr, tile, first_key,
                        end_key, num_blocks, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                else:
                    copy_tile(
                        value_desc, value_buffer.index(stage), value_copied, block_row_ptr, tile, first_key, end_key,
                        num_blocks, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                    mbarrier.wait(value_copied, copies & 1)
                    copies += 1
                    LINES: gl.constexpr = 8
                    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_PAD, HEAD_PAD // 8], [1, 1], [1, 0])
                    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
                    for i in gl.static_range(TILE // LINES):
                        if (i + 1) * LINES > valid_keys:
                            part = value_buffer.index(stage).slice(i * LINES, LINES)
                            values = part.load(layout)
                            part.store(gl.where((i * LINES + lines < valid_keys)[:, None], values, 0.0))
                        elif window is not None and (i + 1) * LINES <= first_key - tile * TILE:
                            # Blocks before the window were replaced by its first block, which may be the row's last.
                            part = value_buffer.index(stage).slice(i * LINES, LINES)
                            part.store(gl.zeros([LINES, HEAD_PAD], value_buffer.dtype, layout))
                    fence_async_shared()
                    mbarrier.arrive(value_full.index(stage), count=1)
                valid_keys = TILE
                step += 1
                tile -= 1
    write_last_record(records, q_full, q_empty, counters_ptr, turn, num_programs, q_buffer.shape[0], 1)
