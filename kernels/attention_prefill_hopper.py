"""Prefill attention written for Hopper's copy engine and wgmma (Gluon): what attention_prefill.py computes, for long steps.

The same units, listed by the same schedule: one query tile of one KV head. A program has three parts that talk through
barriers in shared memory. One warp takes units and has queries, keys and values copied (TMA), two tiles ahead; two warpgroups
each keep half of the query rows. A warpgroup starts the next tile's scores and this tile's weighted sum together, and
computes the softmax of the one while the other is under way; the two take turns at the tensor cores. After Shah et al.,
FlashAttention-3 (2024), sections 3.1 and 3.2.

Rows of a tile are ordered by head, then token: row m is token m % TOKENS of head m // TOKENS of the group.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels import hopper, tma
from quire.kernels.attention_prefill_schedule import HOPPER_ROWS, PrefillWorkspace
from quire.kernels.attention_tile import LOG2_E

TILE = 128  # keys
STAGES = 2  # tiles of keys and of values in shared memory
TAKE_TURNS = True  # at the tensor cores
LOADER_REGISTERS = 24  # a thread; the two warpgroups have what it leaves
FIELDS = gl.constexpr(8)  # what the loader tells of a unit

_copy = tma.copy


@gluon.jit
def _tell(records, half, field: gl.constexpr, value):
    records.index(half * FIELDS + field).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _read(records, half, field: gl.constexpr):
    return gl.max(records.index(half * FIELDS + field).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _load_tile(
    desc, buffer, ready, block_row_ptr, tile, end_key, num_blocks, kv_head,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of keys or values, block by block; a block that no query sees is replaced by the first."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    mbarrier.expect(ready, TILE * desc.block_type.shape[1] * desc.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(TILE // BOX):
        key = tile * TILE + i * BOX
        key = gl.where(key < end_key, key, tile * TILE)
        block = gl.load(block_row_ptr + key // BLOCK_SIZE)
        block = gl.minimum(gl.maximum(block, 0), num_blocks - 1)
        line = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        _copy(desc, [line, 0], ready, buffer.slice(i * BOX, BOX))


@gluon.jit
def _loader(
    descs, shared, value_copied, block_table_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, header_ptr,
    tile_rows_ptr, tile_indices_ptr, counters_ptr, num_slots, num_blocks, num_tokens, max_keys, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, key_desc, value_desc = descs
    q_buffer, key_buffer, value_buffer, records, q_ready, q_free, key_ready, key_free, value_ready, value_free = shared
    num_programs = gl.num_programs(0)
    splits = gl.load(header_ptr + 1)
    num_units = gl.load(header_ptr) * NUM_KV_HEADS * splits
    unit = gl.program_id(0)
    turn = 0
    step = 0
    copies = 0
    while unit < num_units:
        whole_unit = unit // splits
        split = unit % splits
        entry = whole_unit // NUM_KV_HEADS
        kv_head = whole_unit % NUM_KV_HEADS
        row = gl.load(tile_rows_ptr + entry)
        first_token = gl.load(tile_indices_ptr + entry) * TOKENS
        unit = gl.atomic_add(counters_ptr, 1, sem="relaxed") + num_programs
        begin = gl.minimum(gl.maximum(gl.load(query_start_ptr + row), 0), num_tokens)
        query_len = gl.minimum(gl.maximum(gl.load(query_start_ptr + row + 1), begin), num_tokens) - begin
        seq_len = gl.minimum(gl.maximum(gl.load(seq_lens_ptr + row), 0), max_keys)
        slot = gl.minimum(gl.maximum(gl.load(row_slots_ptr + row), 0), num_slots - 1)
        block_row_ptr = block_table_ptr + slot.to(gl.int64) * stride_table
        first_position = gl.maximum(seq_len - query_len + first_token, 0)
        live = gl.minimum(TOKENS, query_len - first_token)
        end_key = gl.minimum(first_position + live, seq_len)
        split_tiles = gl.cdiv(gl.cdiv(end_key, TILE), splits)
        tile_begin = split * split_tiles
        tile_end = gl.minimum(tile_begin + split_tiles, gl.cdiv(end_key, TILE))
        if tile_begin < tile_end:  # else the row is too short for a part of its own
            tile = tile_end - 1
            half = turn % 2
            mbarrier.wait(q_free.index(half), (turn // 2 & 1) ^ 1)
            _tell(records, half, 0, tile_end)
            _tell(records, half, 1, first_position)
            _tell(records, half, 2, end_key)
            _tell(records, half, 3, begin + first_token)
            _tell(records, half, 4, live)
            _tell(records, half, 5, kv_head)
            _tell(records, half, 6, tile_begin)
            _tell(records, half, 7, whole_unit)
            mbarrier.expect(q_ready.index(half), GROUP * TOKENS * HEAD_DIM * q_desc.dtype.primitive_bitwidth // 8)
            for head in gl.static_range(GROUP):
                _copy(
                    q_desc, [begin + first_token, (kv_head * GROUP + head) * HEAD_DIM], q_ready.index(half),
                    q_buffer.index(half).slice(head * TOKENS, TOKENS),
                )  # fmt: skip
            turn += 1

            stage = step % STAGES
            mbarrier.wait(key_free.index(stage), (step // STAGES & 1) ^ 1)
            _load_tile(
                key_desc, key_buffer.index(stage), key_ready.index(stage), block_row_ptr, tile, end_key, num_blocks, kv_head,
                NUM_KV_HEADS, BLOCK_SIZE, TILE,
            )  # fmt: skip
            # What lies behind a row's last key may be anything, NaN too, and 0 * NaN would pass through the product with V.
            garbage = seq_len - tile * TILE
            while tile >= tile_begin:
                if tile > tile_begin:
                    next_stage = (step + 1) % STAGES
                    mbarrier.wait(key_free.index(next_stage), ((step + 1) // STAGES & 1) ^ 1)
                    _load_tile(
                        key_desc, key_buffer.index(next_stage), key_ready.index(next_stage), block_row_ptr, tile - 1, end_key,
                        num_blocks, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                stage = step % STAGES
                mbarrier.wait(value_free.index(stage), (step // STAGES & 1) ^ 1)
                if garbage >= TILE:
                    _load_tile(
                        value_desc, value_buffer.index(stage), value_ready.index(stage), block_row_ptr, tile, end_key,
                        num_blocks, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                else:
                    _load_tile(
                        value_desc, value_buffer.index(stage), value_copied, block_row_ptr, tile, end_key, num_blocks, kv_head,
                        NUM_KV_HEADS, BLOCK_SIZE, TILE,
                    )  # fmt: skip
                    mbarrier.wait(value_copied, copies & 1)
                    copies += 1
                    LINES: gl.constexpr = 8
                    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [1, 1], [1, 0])
                    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
                    for i in gl.static_range(TILE // LINES):
                        if (i + 1) * LINES > garbage:
                            part = value_buffer.index(stage).slice(i * LINES, LINES)
                            values = part.load(layout)
                            part.store(gl.where((i * LINES + lines < garbage)[:, None], values, 0.0))
                    fence_async_shared()
                    mbarrier.arrive(value_ready.index(stage), count=1)
                garbage = TILE
                step += 1
                tile -= 1

    half = turn % 2
    mbarrier.wait(q_free.index(half), (turn // 2 & 1) ^ 1)
    _tell(records, half, 0, 0)
    mbarrier.arrive(q_ready.index(half), count=1)
    # The last program to finish leaves the counters at 0 for the next launch.
    finished = gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if finished == num_programs - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def _attend_tile(
    acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_ready, key_free, value_ready, value_free, turns,
    positions, tile, step, qk_scale,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    scores_layout: gl.constexpr, weights_layout: gl.constexpr,
):  # fmt: skip
    """Add tile + 1's weighted values to acc, and return tile's weights."""
    stage = step % STAGES
    last = (step - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), step // STAGES & 1)
    if TAKE_TURNS:
        mbarrier.wait(turns.index(WARPGROUP), (step + WARPGROUP + 1) & 1)
    scores = gl.zeros([64, TILE], gl.float32, scores_layout)
    scores = warpgroup_mma(q, key_buffer.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    weights = gl.convert_layout(weights.to(value_buffer.dtype), weights_layout)
    mbarrier.wait(value_ready.index(last), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, value_buffer.index(last), acc, is_async=True)
    if TAKE_TURNS:
        mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_free.index(stage), count=1)
    if MASKED:
        keys = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout))
        scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    scaled_max = new_max * qk_scale
    if MASKED:
        scaled_max = gl.where(new_max == float("-inf"), 0.0, scaled_max)
    new_weights = tl.exp2(scores * qk_scale - scaled_max[:, None])
    alpha = tl.exp2(row_max * qk_scale - scaled_max)
    row_sum = row_sum * alpha + gl.sum(new_weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_free.index(last), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, new_weights, new_max, row_sum


@gluon.jit
def _part_offsets(slot, WARPGROUP: gl.constexpr, HEAD_DIM: gl.constexpr, layout: gl.constexpr):
    """(lines [64] of row sums, offsets [64, HEAD_DIM] of weighted values) of a warpgroup's half of a part."""
    lines = (slot * 2 + WARPGROUP) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    return lines, lines.to(gl.int64)[:, None] * HEAD_DIM + columns[None, :]


@gluon.jit
def _leave_part(
    partial, arrival_ptr, slot, acc, row_max, row_sum,
    WARPGROUP: gl.constexpr, HEAD_DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """attention_tile.leave_part, for one warpgroup."""
    _header_ptr, _counters_ptr, out_ptr, max_ptr, sum_ptr = partial
    lines, offsets = _part_offsets(slot, WARPGROUP, HEAD_DIM, layout)
    gl.store(out_ptr + offsets, acc)
    gl.store(max_ptr + lines, row_max)
    gl.store(sum_ptr + lines, row_sum)
    tl.debug_barrier()
    arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return arrived


@gluon.jit
def _combine_parts(partial, first_slot, parts, WARPGROUP: gl.constexpr, HEAD_DIM: gl.constexpr, layout: gl.constexpr):
    """attention_tile.combine_parts, for one warpgroup."""
    _header_ptr, _counters_ptr, out_ptr, max_ptr, sum_ptr = partial
    acc = gl.zeros([64, HEAD_DIM], gl.float32, layout)
    total_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    for part in range(parts):
        lines, offsets = _part_offsets(first_slot + part, WARPGROUP, HEAD_DIM, layout)
        maximum = gl.load(max_ptr + lines, cache_modifier=".cg")
        new_max = gl.maximum(total_max, maximum)
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(maximum - base)
        rescale = tl.exp2(total_max - base)
        total_sum = total_sum * rescale + weight * gl.load(sum_ptr + lines, cache_modifier=".cg")
        acc = acc * rescale[:, None] + weight[:, None] * gl.load(out_ptr + offsets, cache_modifier=".cg")
        total_max = new_max
    return acc, total_sum


@gluon.jit
def _attender(
    shared, turns, output, partial,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows 64 * WARPGROUP and on of each unit's query tile."""
    q_buffer, key_buffer, value_buffer, records, q_ready, q_free, key_ready, key_free, value_ready, value_free = shared
    out_ptr, qk_scale, stride_out_token, stride_out_head = output
    header_ptr, counters_ptr, _partial_out_ptr, _partial_max_ptr, _partial_sum_ptr = partial
    splits = gl.load(header_ptr + 1)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
    turn = 0
    step = 0
    mbarrier.wait(q_ready.index(0), 0)
    tile_end = _read(records, 0, 0)
    while tile_end > 0:
        half = turn % 2
        first_position = _read(records, half, 1)
        end_key = _read(records, half, 2)
        first_line = _read(records, half, 3)
        live = _read(records, half, 4)
        kv_head = _read(records, half, 5)
        tile_begin = _read(records, half, 6)
        whole_unit = _read(records, half, 7)
        positions = gl.minimum(first_position + rows % TOKENS, end_key - 1)
        q = q_buffer.index(half).slice(WARPGROUP * 64, 64)

        # The last tile, in which the queries themselves may stand.
        tile = tile_end - 1
        stage = step % STAGES
        mbarrier.wait(key_ready.index(stage), step // STAGES & 1)
        if TAKE_TURNS:
            mbarrier.wait(turns.index(WARPGROUP), (step + WARPGROUP + 1) & 1)
        scores = gl.zeros([64, TILE], gl.float32, scores_layout)
        scores = warpgroup_mma(q, key_buffer.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        if TAKE_TURNS:
            mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        keys = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout))
        scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        row_max = gl.max(scores, 1)
        scaled_max = gl.where(row_max == float("-inf"), 0.0, row_max * qk_scale)
        weights = tl.exp2(scores * qk_scale - scaled_max[:, None])
        row_sum = gl.sum(weights, 1)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, out_layout)
        step += 1
        tile -= 1
        while (tile >= tile_begin) & ((tile + 1) * TILE > first_position + 1):
            acc, weights, row_max, row_sum = _attend_tile(
                acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_ready, key_free, value_ready, value_free,
                turns, positions, tile, step, qk_scale, WARPGROUP, True, TILE, STAGES, TAKE_TURNS,
                scores_layout, weights_layout,
            )  # fmt: skip
            step += 1
            tile -= 1
        while tile >= tile_begin:
            acc, weights, row_max, row_sum = _attend_tile(
                acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_ready, key_free, value_ready, value_free,
                turns, positions, tile, step, qk_scale, WARPGROUP, False, TILE, STAGES, TAKE_TURNS,
                scores_layout, weights_layout,
            )  # fmt: skip
            step += 1
            tile -= 1
        mbarrier.arrive(q_free.index(half), count=1)
        last = (step - 1) % STAGES
        mbarrier.wait(value_ready.index(last), (step - 1) // STAGES & 1)
        weights = gl.convert_layout(weights.to(value_buffer.dtype), weights_layout)
        acc = warpgroup_mma(weights, value_buffer.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(value_free.index(last), count=1)

        row_max = gl.convert_layout(row_max * qk_scale, gl.SliceLayout(1, out_layout))
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, out_layout))
        key_tiles = gl.cdiv(end_key, TILE)
        parts = gl.cdiv(key_tiles, gl.cdiv(key_tiles, splits))
        last = parts == 1
        if parts > 1:
            arrival_ptr = counters_ptr + 2 + whole_unit * 2 + WARPGROUP
            first_slot = whole_unit * splits
            part = tile_begin // gl.cdiv(key_tiles, splits)
            arrived = _leave_part(
                partial, arrival_ptr, first_slot + part, acc, row_max, row_sum, WARPGROUP, HEAD_DIM, out_layout
            )  # fmt: skip
            last = arrived == parts - 1
            if last:
                gl.store(arrival_ptr, 0)
                acc, row_sum = _combine_parts(partial, first_slot, parts, WARPGROUP, HEAD_DIM, out_layout)
        if last:
            values = (acc / gl.where(row_sum == 0.0, 1.0, row_sum)[:, None]).to(out_ptr.dtype.element_ty)
            store_layout: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
            values = gl.convert_layout(values, store_layout)
            out_rows = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, store_layout))
            columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, store_layout))
            line = (first_line + out_rows % TOKENS).to(gl.int64)
            offsets = line * stride_out_token + (kv_head * GROUP + out_rows // TOKENS) * stride_out_head
            gl.store(out_ptr + offsets[:, None] + columns[None, :], values, mask=(out_rows % TOKENS < live)[:, None])

        turn += 1
        mbarrier.wait(q_ready.index(turn % 2), turn // 2 & 1)
        tile_end = _read(records, turn % 2, 0)


@gluon.jit(
    do_not_specialize=["num_slots", "num_blocks", "num_tokens", "max_keys", "stride_table"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def _kernel(
    q_desc, key_desc, value_desc, out_ptr, block_table_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, header_ptr,
    tile_rows_ptr, tile_indices_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, counters_ptr, qk_scale, num_slots,
    num_blocks, num_tokens, max_keys, stride_out_token, stride_out_head, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = key_desc.layout
    q_buffer = gl.allocate_shared_memory(q_desc.dtype, [2, GROUP * TOKENS, HEAD_DIM], layout)
    key_buffer = gl.allocate_shared_memory(key_desc.dtype, [STAGES, TILE, HEAD_DIM], layout)
    value_buffer = gl.allocate_shared_memory(value_desc.dtype, [STAGES, TILE, HEAD_DIM], layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    records = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_copied = gl.allocate_shared_memory(gl.int64, [1], bars)
    mbarrier.init(value_copied, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(i), count=1)
        mbarrier.init(key_free.index(i), count=2)
        mbarrier.init(value_ready.index(i), count=1)
        mbarrier.init(value_free.index(i), count=2)
    fence_async_shared()
    shared = (q_buffer, key_buffer, value_buffer, records, q_ready, q_free, key_ready, key_free, value_ready, value_free)
    output = (out_ptr, qk_scale, stride_out_token, stride_out_head)
    partial = (header_ptr, counters_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr)
    gl.warp_specialize(
        [
            (_attender, (shared, turns, output, partial, 0, GROUP, TOKENS, HEAD_DIM, TILE, STAGES, TAKE_TURNS)),
            (_attender, (shared, turns, output, partial, 1, GROUP, TOKENS, HEAD_DIM, TILE, STAGES, TAKE_TURNS)),
            (
                _loader,
                (
                    (q_desc, key_desc, value_desc), shared, value_copied, block_table_ptr, row_slots_ptr, query_start_ptr,
                    seq_lens_ptr, header_ptr, tile_rows_ptr, tile_indices_ptr, counters_ptr, num_slots, num_blocks, num_tokens,
                    max_keys, stride_table, NUM_KV_HEADS, GROUP, TOKENS, HEAD_DIM, BLOCK_SIZE, TILE, STAGES,
                ),
            ),
        ],
        [4, 1],
        [(3 * 168 - LOADER_REGISTERS) // 16 * 8, LOADER_REGISTERS],
    )  # fmt: skip


def can_copy(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether TMA can read these: a token's heads side by side, whole caches of q's type, lines aligned to 16 bytes."""
    if not q.dtype == k_cache.dtype == v_cache.dtype or k_cache.shape[2] < 8 or q.stride(1) != q.shape[2]:
        return False
    whole = k_cache.is_contiguous() and v_cache.is_contiguous()
    return whole and all(hopper.can_copy(t) for t in (q, k_cache, v_cache))


def launch(
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
) -> None:
    """Arguments as in `prefill_attention`, for tensors of which `can_copy` is true."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    num_slots, max_blocks = block_table.shape
    tokens = HOPPER_ROWS // (num_heads // num_kv_heads)

    keys, values = (
        tma.lines(cache, num_blocks * num_kv_heads * block_size, head_dim, head_dim, (min(block_size, TILE), head_dim))
        for cache in (k_cache, v_cache)
    )
    _kernel[(workspace.num_programs // workspace.config.programs_per_sm,)](
        tma.lines(q, num_tokens, num_heads * head_dim, q.stride(0), (tokens, head_dim)),
        keys,
        values,
        out,
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
        scale * LOG2_E,
        num_slots,
        num_blocks,
        num_tokens,
        max_blocks * block_size,
        *out.stride()[:2],
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        STAGES=STAGES,
        TAKE_TURNS=TAKE_TURNS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        maxnreg=168,  # a third of the threads each: loader (a warp of its group is used), and two groups that compute
    )
