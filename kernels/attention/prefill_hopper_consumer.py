"""The consumers of Hopper's prefill attention: two warpgroups, each with half of the rows of a query tile, online softmax.

A warpgroup starts the next tile's scores and this tile's weighted sum together, and computes the softmax of the one while the
other is being computed; with PING_PONG the two take turns at the tensor cores. After Shah et al., FlashAttention-3 (2024),
sections 3.1 and 3.2. Row m of a tile is token m % TOKENS of head m // TOKENS, of HEADS of a group's heads; rows beyond HEADS *
TOKENS are computed and not stored.

The weights are an operand in registers, which the asynchronous product reads until it is waited for. `deps` of the wait cannot
keep them there: in PTX they would stand in a comment. tests/kernels/test_wgmma_operands.py checks the machine code.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.attention.prefill_hopper_producer import (
    END_KEY,
    FIRST_POSITION,
    FIRST_TOKEN,
    KV_HEAD,
    LIVE_TOKENS,
    TILE_BEGIN,
    TILE_END,
    WHOLE_UNIT,
    read_field,
)


@gluon.jit
def _reciprocal(x):
    """1 / x, exact to a unit in the last place, without a division's special treatment of subnormals."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _shaped(scores, cap, cap_scale, window, positions, tile, MASKED: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """Scores [64, TILE], capped in units of log2 if there is a cap, and -inf where a row does not see a key."""
    if cap is not None:  # cap * tanh(x), with tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap - (2.0 * cap) * _reciprocal(tl.exp2(scores * cap_scale) + 1.0)
    if MASKED:
        keys = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        visible = keys[None, :] <= positions[:, None]
        if window is not None:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _consume_tile(
    acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_full, key_empty, value_full, value_empty, turns,
    cap, cap_scale, window, positions, tile, step, qk_scale,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    scores_layout: gl.constexpr, weights_layout: gl.constexpr,
):  # fmt: skip
    """Add the weighted values of tile `tile + 1` to acc, and return the weights of tile `tile`."""
    stage = step % STAGES
    last = (step - 1) % STAGES
    mbarrier.wait(key_full.index(stage), step // STAGES & 1)
    if PING_PONG:
        mbarrier.wait(turns.index(WARPGROUP), (step + WARPGROUP + 1) & 1)
    scores = gl.zeros([64, TILE], gl.float32, scores_layout)
    scores = warpgroup_mma(q, key_buffer.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    weights = gl.convert_layout(weights.to(value_buffer.dtype), weights_layout)
    mbarrier.wait(value_full.index(last), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, value_buffer.index(last), acc, is_async=True)
    if PING_PONG:
        mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_empty.index(stage), count=1)
    scores = _shaped(scores, cap, cap_scale, window, positions, tile, MASKED, TILE, scores_layout)
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    scaled_max = new_max * qk_scale
    if MASKED:
        scaled_max = gl.where(new_max == float("-inf"), 0.0, scaled_max)
    new_weights = tl.exp2(scores * qk_scale - scaled_max[:, None])
    alpha = tl.exp2(row_max * qk_scale - scaled_max)
    row_sum = row_sum * alpha + gl.sum(new_weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(value_empty.index(last), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, new_weights, new_max, row_sum


@gluon.jit
def _part_offsets(slot, WARPGROUP: gl.constexpr, HEAD_PAD: gl.constexpr, layout: gl.constexpr):
    """(lines [64] of row sums, offsets [64, HEAD_PAD] of weighted values) of a warpgroup's half of a split."""
    lines = (slot * 2 + WARPGROUP) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD_PAD, layout=gl.SliceLayout(0, layout))
    return lines, lines.to(gl.int64)[:, None] * HEAD_PAD + columns[None, :]


@gluon.jit
def _store_partial(
    partial, arrival_ptr, slot, acc, row_max, row_sum,
    WARPGROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """tile.store_partial, for one warpgroup: acc [64, HEAD_PAD], row_max, row_sum [64]."""
    _header_ptr, _counters_ptr, out_ptr, max_ptr, sum_ptr = partial
    lines, offsets = _part_offsets(slot, WARPGROUP, acc.shape[1], layout)
    gl.store(out_ptr + offsets, acc)
    gl.store(max_ptr + lines, row_max)
    gl.store(sum_ptr + lines, row_sum)
    tl.debug_barrier()
    arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return arrived


@gluon.jit
def _reduce_partials(partial, first_slot, parts, WARPGROUP: gl.constexpr, HEAD_PAD: gl.constexpr, layout: gl.constexpr):
    """(acc, row_max, row_sum), as in tile.reduce_partials, for one warpgroup."""
    _header_ptr, _counters_ptr, out_ptr, max_ptr, sum_ptr = partial
    acc = gl.zeros([64, HEAD_PAD], gl.float32, layout)
    total_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    for part in range(parts):
        lines, offsets = _part_offsets(first_slot + part, WARPGROUP, HEAD_PAD, layout)
        maximum = gl.load(max_ptr + lines, cache_modifier=".cg")
        new_max = gl.maximum(total_max, maximum)
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(maximum - base)
        rescale = tl.exp2(total_max - base)
        total_sum = total_sum * rescale + weight * gl.load(sum_ptr + lines, cache_modifier=".cg")
        acc = acc * rescale[:, None] + weight[:, None] * gl.load(out_ptr + offsets, cache_modifier=".cg")
        total_max = new_max
    return acc, total_max, total_sum


@gluon.jit
def consume(
    shared, turns, output, partial, shaping,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr, KEY_SCALE: gl.constexpr, VALUE_SCALE: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: rows 64 * WARPGROUP and on of each unit's query tile.

    shared: as in `produce`. output: out and its strides, log2(e) * scale, the cache's scales. partial: header, counters and the
    memory of partial sums. shaping: sinks, softcap, window, each None if there is none.
    """
    PARTS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    q_buffer, key_buffer, value_buffer, records, q_full, q_empty, key_full, key_empty, value_full, value_empty = shared
    out_ptr, qk_scale, k_scale_ptr, v_scale_ptr, stride_out_token, stride_out_head = output
    if KEY_SCALE:
        qk_scale = qk_scale * gl.load(k_scale_ptr)
    sinks_ptr, softcap, window = shaping
    cap = None
    cap_scale = None
    if softcap is not None:
        cap = softcap * 1.4426950408889634
        cap_scale = qk_scale * (2.0 / softcap)
        qk_scale = 1.0  # capped scores are in units of log2
    Q_STAGES: gl.constexpr = q_buffer.shape[0]
    HEAD_PAD: gl.constexpr = q_buffer.shape[2]
    header_ptr, counters_ptr, _partial_out_ptr, _partial_max_ptr, _partial_sum_ptr = partial
    splits = gl.load(header_ptr + 1)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_PAD, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
    turn = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    tile_end = read_field(records, 0, TILE_END)
    while tile_end > 0:
        q_stage = turn % Q_STAGES
        first_position = read_field(records, q_stage, FIRST_POSITION)
        end_key = read_field(records, q_stage, END_KEY)
        first_line = read_field(records, q_stage, FIRST_TOKEN)
        live = read_field(records, q_stage, LIVE_TOKENS)
        kv_head = read_field(records, q_stage, KV_HEAD)
        tile_begin = read_field(records, q_stage, TILE_BEGIN)
        whole_unit = read_field(records, q_stage, WHOLE_UNIT)
        positions = gl.minimum(first_position + rows % TOKENS, end_key - 1)
        q = q_buffer.index(q_stage).slice(WARPGROUP * 64, 64)

        # The last tile, which may contain the queries' own positions.
        tile = tile_end - 1
        stage = step % STAGES
        mbarrier.wait(key_full.index(stage), step // STAGES & 1)
        if PING_PONG:
            mbarrier.wait(turns.index(WARPGROUP), (step + WARPGROUP + 1) & 1)
        scores = gl.zeros([64, TILE], gl.float32, scores_layout)
        scores = warpgroup_mma(q, key_buffer.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        if PING_PONG:
            mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_empty.index(stage), count=1)
        scores = _shaped(scores, cap, cap_scale, window, positions, tile, True, TILE, scores_layout)
        row_max = gl.max(scores, 1)
        scaled_max = gl.where(row_max == float("-inf"), 0.0, row_max * qk_scale)
        weights = tl.exp2(scores * qk_scale - scaled_max[:, None])
        row_sum = gl.sum(weights, 1)
        acc = gl.zeros([64, HEAD_PAD], gl.float32, out_layout)
        step += 1
        tile -= 1
        # The loops: tiles that some queries see partly; those that all see in full; those partly before the window of some.
        full_begin = tile_begin
        if window is not None:
            full_begin = gl.maximum(gl.cdiv(gl.maximum(end_key - window, 0), TILE), tile_begin)
        while (tile >= tile_begin) & ((tile + 1) * TILE > first_position + 1):
            acc, weights, row_max, row_sum = _consume_tile(
                acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_full, key_empty, value_full, value_empty,
                turns, cap, cap_scale, window, positions, tile, step, qk_scale, WARPGROUP, True, TILE, STAGES, PING_PONG,
                scores_layout, weights_layout,
            )  # fmt: skip
            step += 1
            tile -= 1
        while tile >= full_begin:
            acc, weights, row_max, row_sum = _consume_tile(
                acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_full, key_empty, value_full, value_empty,
                turns, cap, cap_scale, window, positions, tile, step, qk_scale, WARPGROUP, False, TILE, STAGES, PING_PONG,
                scores_layout, weights_layout,
            )  # fmt: skip
            step += 1
            tile -= 1
        if window is not None:
            while tile >= tile_begin:
                acc, weights, row_max, row_sum = _consume_tile(
                    acc, weights, row_max, row_sum, q, key_buffer, value_buffer, key_full, key_empty, value_full, value_empty,
                    turns, cap, cap_scale, window, positions, tile, step, qk_scale, WARPGROUP, True, TILE, STAGES, PING_PONG,
                    scores_layout, weights_layout,
                )  # fmt: skip
                step += 1
                tile -= 1
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        last = (step - 1) % STAGES
        mbarrier.wait(value_full.index(last), (step - 1) // STAGES & 1)
        weights = gl.convert_layout(weights.to(value_buffer.dtype), weights_layout)
        acc = warpgroup_mma(weights, value_buffer.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(value_empty.index(last), count=1)

        row_max = gl.convert_layout(row_max * qk_scale, gl.SliceLayout(1, out_layout))
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, out_layout))
        key_tiles = gl.cdiv(end_key, TILE)
        first_tile = 0
        if window is not None:
            first_tile = gl.maximum(first_position - window + 1, 0) // TILE
            key_tiles -= first_tile
        parts = gl.cdiv(key_tiles, gl.cdiv(key_tiles, splits))
        last = parts == 1
        if parts > 1:
            arrival_ptr = counters_ptr + 2 + whole_unit * 2 + WARPGROUP
            first_slot = whole_unit * splits
            part = (tile_begin - first_tile) // gl.cdiv(key_tiles, splits)
            arrived = _store_partial(
                partial, arrival_ptr, first_slot + part, acc, row_max, row_sum, WARPGROUP, out_layout
            )  # fmt: skip
            last = arrived == parts - 1
            if last:
                gl.store(arrival_ptr, 0)
                acc, row_max, row_sum = _reduce_partials(partial, first_slot, parts, WARPGROUP, HEAD_PAD, out_layout)
        if last:
            out_rows = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
            if sinks_ptr is not None:
                head = gl.minimum(kv_head % PARTS * HEADS + out_rows // TOKENS, GROUP - 1)
                sinks = gl.load(sinks_ptr + kv_head // PARTS * GROUP + head).to(gl.float32) * 1.4426950408889634
                row_sum = row_sum + tl.exp2(sinks - row_max)  # infinite if the sink has all the weight
            # Each thread stores the pairs that it holds: wider stores would go through shared memory, and the data there was
            # now and then that of another process when processes take turns on a GPU (benchmarks/LOG.md, 2026-11-22).
            values = acc / gl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
            if VALUE_SCALE:
                values = values * gl.load(v_scale_ptr)
            values = values.to(out_ptr.dtype.element_ty)
            columns = gl.arange(0, HEAD_PAD, layout=gl.SliceLayout(0, out_layout))
            line = (first_line + out_rows % TOKENS).to(gl.int64)
            head = kv_head % PARTS * HEADS + out_rows // TOKENS
            offsets = line * stride_out_token + (kv_head // PARTS * GROUP + head) * stride_out_head
            mask = (out_rows % TOKENS < live)[:, None]
            if HEADS * TOKENS < 128:
                mask = mask & (out_rows < HEADS * TOKENS)[:, None]
            if PARTS > 1:
                mask = mask & (head < GROUP)[:, None]
            if HEAD_DIM < HEAD_PAD:
                mask = mask & (columns < HEAD_DIM)[None, :]
            gl.store(out_ptr + offsets[:, None] + columns[None, :], values, mask=mask)

        turn += 1
        mbarrier.wait(q_full.index(turn % Q_STAGES), turn // Q_STAGES & 1)
        tile_end = read_field(records, turn % Q_STAGES, TILE_END)
