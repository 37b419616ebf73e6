"""Paged attention for prefill rows: any number of query tokens a row, the last positions of its keys (chunked prefill).

Formula and masks: tile.py. A unit of work is one query tile (64-128 rows: tokens x the group's heads or some of them, so that
Hopper's wgmma is used) of one KV head. `prefill_schedule` lists the query tiles of a step on the device, once for all layers,
last tile of a row first, since it sees most keys. A fixed grid of programs then takes units from an atomic counter, so that
unequal tiles and unused grid (graphs captured for more rows than there are) cost nothing. KV tiles that every query of the tile
sees in full run in a loop without masks. If there are few query tiles but many keys (a short prompt behind a long cached one),
the schedule also splits the keys; the last program to finish reduces the partial sums, as in decode.py. On a Hopper GPU, 16-bit
models without ALiBi use prefill_hopper.py, but for steps in which queries see keys behind their own (last_visible), where a
query tile's keys end with the last that one of its queries sees. With `--deterministic` this kernel computes decode rows, too.

FLOPs: 4 * Hq * D a visible (query, key) pair. Bytes: q and out once; keys and values once per query tile, mostly from L2.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.attention.prefill_schedule import PrefillWorkspace
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
    windowed,
)
from quire.kernels.tuning.current import current


@triton.jit
def _load_unit(
    tile_rows_ptr, tile_indices_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, unit, num_units, splits, num_slots,
    num_tokens, max_keys, NUM_KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """(first token of the unit's query tile within its row, first token of the row, its queries, its keys, its slot)."""
    entry = unit // splits // NUM_KV_HEADS
    row = tl.load(tile_rows_ptr + entry, mask=unit < num_units, other=0)
    first_token = tl.load(tile_indices_ptr + entry, mask=unit < num_units, other=0) * TOKENS
    query_begin, query_len, seq_len = row_lengths(query_start_ptr, seq_lens_ptr, row, num_tokens, max_keys, 0)
    slot = tl.minimum(tl.maximum(tl.load(row_slots_ptr + row), 0), num_slots - 1)
    return first_token, query_begin, query_len, seq_len, slot


@triton.jit(
    do_not_specialize=["num_slots", "num_blocks", "num_tokens", "max_keys", "window", "stride_table"],
    # slices of a step's buffers
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "last_visible_ptr"],
)
def _prefill_kernel(
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
    tile_rows_ptr,
    tile_indices_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    counters_ptr,
    slopes_ptr,
    sinks_ptr,
    last_visible_ptr,
    scale_log2,
    softcap,
    alibi_scale,
    window,
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
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_LANES: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    SEES_AHEAD: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # query tiles that share a group's heads
    num_programs = tl.num_programs(0)
    splits = tl.program_id(0) * 0 + 1
    if MAY_SPLIT:
        splits = tl.load(header_ptr + 1)
    num_units = tl.load(header_ptr) * (NUM_KV_HEADS * PARTS) * splits
    qk_scale = scale_log2
    if HAS_KEY_SCALE:
        qk_scale = scale_log2 * tl.load(key_scale_ptr)
    value_scale = 1.0
    if HAS_VALUE_SCALE:
        value_scale = tl.load(value_scale_ptr)
    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_PAD)
    token = offs_m // HEADS
    lanes = tl.arange(0, NUM_LANES)

    unit = tl.program_id(0)
    first_token, query_begin, query_len, seq_len, slot = _load_unit(
        tile_rows_ptr, tile_indices_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, unit, num_units, splits, num_slots,
        num_tokens, max_keys, NUM_KV_HEADS * PARTS, TOKENS,
    )  # fmt: skip
    while unit < num_units:
        # Ask for the next unit now: the answer arrives while this one's queries are read. One lane asks, and the addend is no
        # constant: a scalar atomic would hand its result to all threads at once, and a constant is summed over the warp; both
        # wait.
        tickets = tl.atomic_add(counters_ptr + lanes * 0, 1 - lanes, mask=lanes == 0, sem="relaxed")
        split = unit % splits
        whole_unit = unit // splits
        kv_head = whole_unit % (NUM_KV_HEADS * PARTS) // PARTS
        head = kv_head * GROUP + offs_m % HEADS
        live = (token < TOKENS) & (first_token + token < query_len)
        if PARTS > 1:
            head += whole_unit % PARTS * HEADS
            live = live & (head < (kv_head + 1) * GROUP)
            head = tl.minimum(head, (kv_head + 1) * GROUP - 1)
        line = (query_begin + first_token + token).to(tl.int64)
        q_offset = line * stride_q_token + head * stride_q_head
        mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = compute_type(tl.load(q_ptr + q_offset[:, None] + offs_d[None, :], mask=mask, other=0.0), key_ptr)

        # Keys: [first_key, ..) seen by some, [full_begin, full_end) whole tiles seen by all, [.., end_key) seen by some.
        first_position = tl.maximum(seq_len - query_len + first_token, 0)
        end_key = tl.minimum(first_position + tl.minimum(TOKENS, query_len - first_token), seq_len)
        positions = tl.minimum(first_position + token, end_key - 1)
        last_keys = positions
        last_position = end_key - 1
        if SEES_AHEAD:  # a tile's keys then end behind its queries, up to the last key that one of them sees
            last = tl.load(last_visible_ptr + line, mask=live, other=0)
            last_keys = tl.minimum(tl.maximum(positions, last), seq_len - 1)
            end_key = tl.maximum(end_key, tl.max(last_keys, 0) + 1)
        first_key = first_visible_key(first_position, window, WINDOWED)
        tile_begin = first_key // TILE
        tile_end = tl.cdiv(end_key, TILE)
        if MAY_SPLIT:
            split_tiles = tl.cdiv(tile_end - tile_begin, splits)
            tile_begin += split * split_tiles
            tile_end = tl.minimum(tile_begin + split_tiles, tile_end)
        full_end = tl.minimum(tl.maximum((first_position + 1) // TILE, tile_begin), tile_end)
        full_begin = tl.cdiv(first_visible_key(last_position, window, WINDOWED), TILE)
        full_begin = tl.minimum(tl.maximum(full_begin, tile_begin), full_end)
        if ALL_MASKED:  # one loop for a tile, whichever queries share it
            full_begin = tile_begin
            full_end = tile_begin
        key_head_ptr = key_ptr + kv_head * stride_key_head
        value_head_ptr = value_ptr + kv_head * stride_value_head
        block_row_ptr = block_table_ptr + slot.to(tl.int64) * stride_table

        unit = tl.sum(tl.where(lanes == 0, tickets, 0), 0) + num_programs
        first_token, query_begin, query_len, seq_len, slot = _load_unit(
            tile_rows_ptr, tile_indices_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, unit, num_units, splits, num_slots,
            num_tokens, max_keys, NUM_KV_HEADS * PARTS, TOKENS,
        )  # fmt: skip
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        row_max, row_sum = first_sums(sinks_ptr, head, split == 0, SINKS)
        slopes = row_slopes(slopes_ptr, head, ALIBI)
        if WINDOWED:
            acc, row_max, row_sum = attend_tiles(
                acc, row_max, row_sum, q, positions, last_keys, key_head_ptr, value_head_ptr, block_row_ptr,
                tile_begin, full_begin, first_key, end_key, qk_scale, softcap, alibi_scale, slopes, window, num_blocks,
                stride_key_block, stride_key_token, stride_value_block, stride_value_token,
                BLOCK_SIZE, TILE, HEAD_DIM, HEAD_PAD, True, False, WINDOWED, SOFTCAP, ALIBI, PRECISION,
            )  # fmt: skip
        # Testing at run time whether to mask, in one loop over all tiles, was 7 % slower on long prompts, 5-10 % faster on
        # short.
        acc, row_max, row_sum = attend_tiles(
            acc, row_max, row_sum, q, positions, last_keys, key_head_ptr, value_head_ptr, block_row_ptr,
            full_begin, full_end, first_key, end_key, qk_scale, softcap, alibi_scale, slopes, window, num_blocks,
            stride_key_block, stride_key_token, stride_value_block, stride_value_token,
            BLOCK_SIZE, TILE, HEAD_DIM, HEAD_PAD, False, False, WINDOWED, SOFTCAP, ALIBI, PRECISION,
        )  # fmt: skip
        acc, row_max, row_sum = attend_tiles(
            acc, row_max, row_sum, q, positions, last_keys, key_head_ptr, value_head_ptr, block_row_ptr,
            full_end, tile_end, first_key, end_key, qk_scale, softcap, alibi_scale, slopes, window, num_blocks,
            stride_key_block, stride_key_token, stride_value_block, stride_value_token,
            BLOCK_SIZE, TILE, HEAD_DIM, HEAD_PAD, True, False, WINDOWED, SOFTCAP, ALIBI, PRECISION,
        )  # fmt: skip
        last = splits == 1
        if MAY_SPLIT and splits > 1:
            arrival_ptr = counters_ptr + 2 + whole_unit
            arrived = store_partial(
                partial_out_ptr, partial_max_ptr, partial_sum_ptr, arrival_ptr, whole_unit * splits + split,
                acc, row_max, row_sum, ROWS, HEAD_DIM, HEAD_PAD,
            )  # fmt: skip
            last = arrived == splits - 1
            if last:
                tl.store(arrival_ptr, 0)
                acc, row_sum = reduce_partials(
                    partial_out_ptr, partial_max_ptr, partial_sum_ptr, whole_unit * splits, whole_unit * splits, 1, splits,
                    ROWS, HEAD_DIM, HEAD_PAD, 1,
                )  # fmt: skip
        if last:
            values = acc * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
            out_offset = line * stride_out_token + head * stride_out_head
            tl.store(out_ptr + out_offset[:, None] + offs_d[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)

    # The last program to finish leaves the counters at 0 for the next launch.
    finished = tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if finished == num_programs - 1:
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


def prefill_attention(
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
    workspace: PrefillWorkspace,
    window: int = 0,
    is_chunked: bool = False,
    shape: ScoreShape = PLAIN_SCORES,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    last_visible: torch.Tensor | None = None,
) -> None:
    """Causal attention of the rows that `prefill_schedule` was given; writes their tokens of `out`, and no others.

    q, out [T, Hq, D]; k_cache, v_cache [num_blocks, Hkv, block_size, D]; block_table [num_slots, max_blocks] int32, by slot;
    row_slots [R], query_start [R + 1] (offsets in q), seq_lens [R] int32, keys of this step included. Query i of a row is at
    position seq_len - query_len + i, and sees all keys before it, its `window` last keys, or, with is_chunked, those of its
    chunk of `window` keys. `shape`: softcap, ALiBi and sinks. k_scale, v_scale [1] fp32 multiply the cache's elements.
    last_visible [T] int32: the last position that each query sees, if that is behind its own; the row must have its key.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    num_slots, max_blocks = block_table.shape
    if (num_heads, num_kv_heads, head_dim) != (workspace.num_heads, workspace.num_kv_heads, workspace.head_dim):
        raise ValueError(f"heads {num_heads}/{num_kv_heads} of {head_dim} do not fit the workspace")
    check_layout(q, k_cache, v_cache, block_table, out, scale)
    shape.check(num_heads)
    # Hopper's kernel masks keys behind a query's own position and stops there: queries that see further run here
    uses_hopper = workspace.hopper and not is_chunked and last_visible is None
    if uses_hopper and (hopper_config := workspace.hopper_config(window, shape)) is not None:
        from quire.kernels.attention import prefill_hopper as hopper

        if hopper.can_copy(q, k_cache, v_cache):
            return hopper.launch(
                q, k_cache, v_cache, block_table, row_slots, query_start, seq_lens, out, scale=scale, workspace=workspace,
                config=hopper_config, window=window, shape=shape, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
    config = workspace.config
    _prefill_kernel[(workspace.num_programs,)](
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
        workspace.header,
        workspace.tile_rows,
        workspace.tile_indices,
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        workspace.counters,
        shape.slopes,
        shape.sinks,
        last_visible,
        scale * LOG2_E,
        shape.softcap,
        shape.alibi_scale,
        window,
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
        HEADS=workspace.tile_heads,
        TOKENS=workspace.tile_tokens,
        ROWS=config.query_rows,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        WINDOWED=windowed(window, is_chunked),
        **shape.flags,
        HAS_KEY_SCALE=k_scale is not None,
        HAS_VALUE_SCALE=v_scale is not None,
        PRECISION="ieee",
        NUM_LANES=config.num_warps * 32,
        MAY_SPLIT=workspace.may_split,
        ALL_MASKED=current().fixed_order,
        SEES_AHEAD=last_visible is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
