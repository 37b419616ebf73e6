"""Paged attention for decode rows: 1-16 query tokens a row, split over the KV length, balanced over the SMs.

Formula and masks: tile.py. The KV tiles of all (row, KV head) pairs, in that order, form one line of units; the programs of a
fixed grid take equal stretches of it, whatever the mix of row lengths. `decode_schedule` (decode_schedule.py) makes the cuts on
the device, once a step. If one program covers a (row, head), it writes straight to `out`; if several share one (split KV), each
stores its partial sums in the workspace, and the last to arrive (an atomic count) reduces them in the order of the keys. So
there is no second launch, and results do not depend on timing. With `fixed_splits` (used for fp32) the cuts depend on the row's
own length alone: a row's result is then the same, bit for bit, in any batch.

Bytes: every visible key and value once, 2 * Hkv * D * itemsize(cache) a token; q and out are small in comparison. The partial
sums are at most 2 a program, and stay in L2.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.decode_rope import (
    Rope,
    angles,
    check_rope,
    load_group,
    rope_lines,
    rope_position,
    rotate_group,
    tile_rows,
)
from quire.kernels.attention.decode_rows import load_row, prefetch_bytes, prefetch_range, prefetch_tile, store_rows
from quire.kernels.attention.decode_schedule import (
    DecodeSchedule,
    DecodeWorkspace,
    program_of,
    program_start,
    row_tiles,
    tiles_per_split,
)
from quire.kernels.attention.rope_kv import largest
from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape
from quire.kernels.attention.tile import (
    LOG2_E,
    attend_tiles,
    check_layout,
    compute_type,
    first_sums,
    first_visible_key,
    reduce_partials,
    row_lengths,
    row_slopes,
    store_partial,
)
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_blocks", "num_tokens", "max_keys", "window", "stride_table"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "slot_mapping_ptr"],  # slices
)
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    header_ptr,
    unit_starts_ptr,
    first_rows_ptr,
    padded_rows_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    arrivals_ptr,
    slopes_ptr,
    sinks_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    rope_positions_ptr,
    max_position,
    scale_log2,
    softcap,
    alibi_scale,
    window,
    num_rows,
    num_slots,
    num_blocks,
    num_tokens,
    max_keys,
    stride_q_token,
    stride_q_head,
    stride_key_block,
    stride_key_head,
    stride_key_token: tl.constexpr,
    stride_value_block,
    stride_value_head,
    stride_value_token: tl.constexpr,
    stride_out_token,
    stride_out_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    PARTIALS_AT_ONCE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TOP: tl.constexpr,
    ROPE_PLACED: tl.constexpr,
):
    program = tl.program_id(0)
    units = tl.load(header_ptr)
    longer = tl.load(header_ptr + 1)
    total_units = tl.load(header_ptr + 2)
    num_padded = tl.load(header_ptr + 3)
    row = num_rows * 0
    if num_rows > 1:  # a single row's lengths are read at once, not after its number: loads one after the other are the cost
        row = tl.load(first_rows_ptr + program)
    row_begin, head_units, query_begin, query_len, seq_len, slot = load_row(
        unit_starts_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, row, num_rows, num_slots, num_tokens, max_keys, MAX_QUERY
    )
    if ROPE > 0 and DEPENDENT_LAUNCH:
        prefetch_range(angles(cos_sin_ptr, seq_len - 1, max_position, HEAD_DIM), HEAD_DIM * 4)
    unit = program_start(program, units, longer)
    end_unit = tl.minimum(program_start(program + 1, units, longer), total_units)
    if PREFETCH_BYTES > 0:
        index = unit - row_begin * NUM_KV_HEADS
        if (unit < end_unit) & (index < head_units * NUM_KV_HEADS):
            kv_head = index // head_units
            first_tile, tiles = row_tiles(query_len, seq_len, window, TILE, WINDOWED)
            tile = first_tile + tl.minimum(index - kv_head * head_units, tiles - 1)
            prefetch_tile(
                key_ptr + kv_head * stride_key_head, value_ptr + kv_head * stride_value_head,
                block_table_ptr + slot.to(tl.int64) * stride_table, tile, num_blocks, stride_key_block, stride_value_block,
                BLOCK_SIZE, TILE, HEAD_DIM, PREFETCH_BYTES,
            )  # fmt: skip
    if DEPENDENT_LAUNCH:
        # The schedule and the step's lengths and block table are read before the wait, and the prefetch of the first tile to L2
        # has begun: `decode_schedule`, and the kernels that wrote those, must come before the chain's last plain launch.
        gdc_wait()
    if DEPENDENT_LAUNCH == 2:  # EARLY; later, large programs of the next kernel would crowd the SMs that happen to be free
        gdc_launch_dependents()

    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_PAD)
    token = offs_m // GROUP
    key_scale = 1.0
    if HAS_KEY_SCALE:
        key_scale = tl.load(key_scale_ptr)
    qk_scale = scale_log2 * key_scale
    value_scale = 1.0
    if HAS_VALUE_SCALE:
        value_scale = tl.load(value_scale_ptr)

    while unit < end_unit:
        # Units of a row: head 0's tiles (or splits), head 1's, ...
        index = unit - row_begin * NUM_KV_HEADS
        if index >= head_units * NUM_KV_HEADS:
            row += 1
            row_begin, head_units, query_begin, query_len, seq_len, slot = load_row(
                unit_starts_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, row, num_rows, num_slots, num_tokens, max_keys,
                MAX_QUERY,
            )  # fmt: skip
        else:
            kv_head = index // head_units
            first_index = index - kv_head * head_units
            first_tile, tiles = row_tiles(query_len, seq_len, window, TILE, WINDOWED)
            if FIXED_SPLITS > 0:
                num_units = 1
                split_tiles = tiles_per_split(tiles, SPLIT_TILES, FIXED_SPLITS)
                tile_begin = first_tile + first_index * split_tiles
                tile_end = tl.minimum(tile_begin + split_tiles, first_tile + tiles)
            else:
                num_units = tl.minimum(end_unit - unit, head_units - first_index)
                tile_begin = first_tile + first_index
                tile_end = tl.minimum(tile_begin + num_units, first_tile + tiles)

            if ROPE > 0:
                has_last_tile = (tile_end == first_tile + tiles) & (tile_begin < tile_end)
                new_position = rope_position(rope_positions_ptr, query_begin, num_tokens, seq_len - 1, ROPE_PLACED)
                a, b, cos, sin, new_slot = load_group(
                    q_ptr, cos_sin_ptr, slot_mapping_ptr, query_begin, kv_head, new_position, max_position, has_last_tile,
                    stride_q_token, NUM_KV_HEADS, GROUP, ROPE, HEAD_DIM,
                )  # fmt: skip
                q = rotate_group(
                    a, b, cos, sin, new_slot, key_ptr + kv_head * stride_key_head, value_ptr + kv_head * stride_value_head,
                    key_scale, value_scale, num_blocks, stride_key_block, stride_key_token, stride_value_block,
                    stride_value_token, GROUP, ROPE, ROWS, HEAD_DIM, BLOCK_SIZE, ROPE_TOP,
                )  # fmt: skip
                q = compute_type(q, key_ptr)
            else:
                q_offset = (query_begin + token).to(tl.int64) * stride_q_token
                q_offset += (kv_head * GROUP + offs_m % GROUP) * stride_q_head
                q_mask = (token < query_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
                q = compute_type(tl.load(q_ptr + q_offset[:, None] + offs_d[None, :], mask=q_mask, other=0.0), key_ptr)
            positions = tl.minimum(seq_len - query_len + token, seq_len - 1)
            first_key = first_visible_key(seq_len - query_len, window, WINDOWED)
            end_key = seq_len
            block_row_ptr = block_table_ptr + slot.to(tl.int64) * stride_table
            parts = head_units
            first_token, num_queries = query_begin, query_len
            pair = row * NUM_KV_HEADS + kv_head
            if index + num_units == head_units * NUM_KV_HEADS:
                # The next row's lengths arrive while this one's tiles are computed.
                row += 1
                row_begin, head_units, query_begin, query_len, seq_len, slot = load_row(
                    unit_starts_ptr, query_start_ptr, seq_lens_ptr, row_slots_ptr, row, num_rows, num_slots, num_tokens,
                    max_keys, MAX_QUERY,
                )  # fmt: skip
            head = kv_head * GROUP + offs_m % GROUP
            row_max, row_sum = first_sums(sinks_ptr, head, first_index == 0, SINKS)
            acc, row_max, row_sum = attend_tiles(
                tl.zeros([ROWS, HEAD_PAD], tl.float32),
                row_max,
                tl.where(tl.arange(0, TILE)[None, :] == 0, row_sum[:, None], 0.0),
                q, positions, positions, key_ptr + kv_head * stride_key_head, value_ptr + kv_head * stride_value_head,
                block_row_ptr, tile_begin, tile_end, first_key, end_key, qk_scale, softcap, alibi_scale,
                row_slopes(slopes_ptr, head, ALIBI), window, num_blocks,
                stride_key_block, stride_key_token, stride_value_block, stride_value_token,
                BLOCK_SIZE, TILE, HEAD_DIM, HEAD_PAD, True, True, WINDOWED, SOFTCAP, ALIBI, PRECISION,
            )  # fmt: skip
            row_sum = tl.sum(row_sum, 1)
            if num_units == parts:
                values = acc * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
                store_rows(
                    out_ptr, values, first_token, num_queries, kv_head * GROUP, stride_out_token, stride_out_head,
                    ROWS, GROUP, HEAD_DIM, HEAD_PAD,
                )  # fmt: skip
            else:
                # Partial sum i of this (row, head) has a slot of its own; STORED_ROWS <= ROWS: rows that fill up the tile are
                # not stored.
                if FIXED_SPLITS > 0:
                    first_slot = pair * FIXED_SPLITS
                    later_slot = first_slot
                    slot_step = 1
                    own_slot = first_slot + first_index
                else:
                    # A program has at most one part that continues another's (slot 2p) and one that others continue (2p + 1).
                    first_program = program_of(unit - first_index, units, longer)
                    parts = program_of(unit - first_index + parts - 1, units, longer) - first_program + 1
                    first_slot = 2 * first_program + 1
                    later_slot = 2 * first_program
                    slot_step = 2
                    own_slot = tl.where(first_index == 0, first_slot, 2 * program)
                arrival_ptr = arrivals_ptr + pair
                arrived = store_partial(
                    partial_out_ptr, partial_max_ptr, partial_sum_ptr, arrival_ptr, own_slot, acc, row_max, row_sum,
                    STORED_ROWS, HEAD_DIM, HEAD_PAD,
                )  # fmt: skip
                if arrived == parts - 1:
                    tl.store(arrival_ptr, 0)
                    combined, combined_sum = reduce_partials(
                        partial_out_ptr, partial_max_ptr, partial_sum_ptr, first_slot, later_slot, slot_step, parts,
                        STORED_ROWS, HEAD_DIM, HEAD_PAD, PARTIALS_AT_ONCE,
                    )  # fmt: skip
                    values = combined * (value_scale / tl.where(combined_sum == 0.0, 1.0, combined_sum))[:, None]
                    store_rows(
                        out_ptr, values, first_token, num_queries, kv_head * GROUP, stride_out_token, stride_out_head,
                        STORED_ROWS, GROUP, HEAD_DIM, HEAD_PAD,
                    )  # fmt: skip
            unit += num_units

    while program < num_padded:
        row = tl.load(padded_rows_ptr + program)
        query_begin, query_len, seq_len = row_lengths(query_start_ptr, seq_lens_ptr, row, num_tokens, max_keys, MAX_QUERY)
        for kv_head in range(NUM_KV_HEADS):
            store_rows(
                out_ptr, tl.zeros([STORED_ROWS, HEAD_PAD], tl.float32), query_begin, query_len, kv_head * GROUP,
                stride_out_token, stride_out_head, STORED_ROWS, GROUP, HEAD_DIM, HEAD_PAD,
            )  # fmt: skip
        program += tl.num_programs(0)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    workspace: DecodeWorkspace,
    schedule: DecodeSchedule,
    shape: ScoreShape = PLAIN_SCORES,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rope: Rope | None = None,
    dependent_launch: int = PLAIN,
) -> None:
    """Causal attention of the rows that `schedule` was computed for; writes their tokens of `out`.

    q, out [T, Hq, D]; k_cache, v_cache [num_blocks, Hkv, block_size, D]; block_table [num_slots, max_blocks] int32, by slot;
    row_slots [R], query_start [R + 1], seq_lens [R] int32. The row's queries are its last positions. A row of seq_len 0 gets
    zeros. `shape`: softcap, ALiBi and sinks. k_scale, v_scale [1] fp32 multiply the cache's elements. With `rope` (see
    `can_fuse`), q is rotated here and k and v are written to the cache, as `rope_kv` would have done before; k_scale and
    v_scale are then allowed for 8-bit caches only.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    num_slots, max_blocks = block_table.shape
    if (num_heads, num_kv_heads, head_dim) != (workspace.num_heads, workspace.num_kv_heads, workspace.head_dim):
        raise ValueError(f"heads {num_heads}/{num_kv_heads} of {head_dim} do not fit the workspace")
    check_layout(q, k_cache, v_cache, block_table, out, scale)
    shape.check(num_heads)
    if rope is not None:
        check_rope(rope, q, k_cache, v_cache, workspace)
        if (k_scale is not None or v_scale is not None) and k_cache.dtype.itemsize > 1:
            raise ValueError("rope writes scaled caches of 8 bits alone")
    num_rows = seq_lens.shape[0]
    config, num_programs = workspace.launch(num_rows)
    rows = triton.next_power_of_2(workspace.max_query_len * num_heads // num_kv_heads)
    head_pad = triton.next_power_of_2(head_dim)
    prefetches = dependent_launch and not workspace.fixed_splits  # before the wait, if a program's first unit is a tile
    _decode_kernel[(num_programs,)](
        q,
        k_cache,
        v_cache,
        out,
        k_scale,
        v_scale,
        block_table,
        row_slots,
        query_start,
        seq_lens,
        schedule.header,
        schedule.unit_starts,
        schedule.first_rows,
        schedule.padded_rows,
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        workspace.arrivals,
        shape.slopes,
        shape.sinks,
        None if rope is None else rope.cos_sin,
        None if rope is None else rope.slot_mapping,
        None if rope is None else rope.positions,
        0 if rope is None else rope.cos_sin.shape[0],
        scale * LOG2_E,
        shape.softcap,
        shape.alibi_scale,
        schedule.window,
        num_rows,
        num_slots,
        num_blocks,
        num_tokens,
        max_blocks * block_size,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        MAX_QUERY=workspace.max_query_len,
        ROWS=tile_rows(rows),
        STORED_ROWS=rows,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        SPLIT_TILES=workspace.split_tokens // config.tile,
        FIXED_SPLITS=workspace.fixed_splits,
        PARTIALS_AT_ONCE=max(1, min(8, 4096 // (rows * head_pad))),
        WINDOWED=schedule.windowed,
        **shape.flags,
        HAS_KEY_SCALE=k_scale is not None,
        HAS_VALUE_SCALE=v_scale is not None,
        PRECISION="ieee",
        PREFETCH_BYTES=prefetch_bytes(k_cache, v_cache, config) if prefetches else 0,
        DEPENDENT_LAUNCH=dependent_launch,
        ROPE=rope_lines(num_heads // num_kv_heads, head_dim) if rope else 0,
        ROPE_TOP=largest(k_cache.dtype) if rope else 0.0,
        ROPE_PLACED=rope is not None and rope.positions is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **launch_options(dependent_launch),
    )
