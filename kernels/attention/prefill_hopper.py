"""Prefill attention written for Hopper's TMA and wgmma (Gluon): computes what prefill.py does, for long steps.

The units and their schedule are the same: one query tile of one KV head each. A program is a producer warp and two consumer
warpgroups (prefill_hopper_producer.py, prefill_hopper_consumer.py), which synchronize through barriers in shared memory. An
8-bit cache is widened on its way, by a producer of four warps (prefill_hopper_widen.py).
FLOPs: 4 * Hq * D a visible (query, key) pair. Bytes: q and out once; keys and values once per query tile, mostly from L2.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.attention.prefill_hopper_consumer import consume
from quire.kernels.attention.prefill_hopper_producer import NUM_FIELDS, produce
from quire.kernels.attention.prefill_hopper_widen import produce_widened
from quire.kernels.attention.prefill_schedule import PrefillWorkspace
from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape
from quire.kernels.attention.tile import LOG2_E
from quire.kernels.triton_support import hopper, tma
from quire.kernels.tuning.configs import HopperPrefillConfig

WIDENING_REGISTERS = 40  # of a thread of the producer, if it widens 8-bit caches
MAX_REGISTERS = gl.constexpr(65536 // (3 * 128) // 8 * 8)  # a thread, before redistribution: three warpgroups fill an SM


@gluon.jit(
    do_not_specialize=["num_slots", "num_blocks", "num_tokens", "max_keys", "stride_table", "window"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def _kernel(
    q_desc, key_desc, value_desc, out_ptr, k_scale_ptr, v_scale_ptr, block_table_ptr, row_slots_ptr, query_start_ptr,
    seq_lens_ptr, header_ptr, tile_rows_ptr, tile_indices_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, counters_ptr,
    qk_scale, num_slots, num_blocks, num_tokens, max_keys, stride_out_token, stride_out_head, stride_table,
    sinks_ptr, softcap, window,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, KEY_SCALE: gl.constexpr, VALUE_SCALE: gl.constexpr,
):  # fmt: skip
    HEAD_PAD: gl.constexpr = key_desc.block_type.shape[1]
    WIDEN: gl.constexpr = key_desc.dtype != q_desc.dtype
    layout: gl.constexpr = q_desc.layout
    q_buffer = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES, 128, HEAD_PAD], layout)
    key_buffer = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, HEAD_PAD], layout)
    value_buffer = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, HEAD_PAD], layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    records = gl.allocate_shared_memory(gl.int32, [2 * NUM_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    copied = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for i in gl.static_range(2):
        mbarrier.init(copied.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(key_full.index(i), count=1)
        mbarrier.init(key_empty.index(i), count=2)
        mbarrier.init(value_full.index(i), count=1)
        mbarrier.init(value_empty.index(i), count=2)
    fence_async_shared()
    shared = (q_buffer, key_buffer, value_buffer, records, q_full, q_empty, key_full, key_empty, value_full, value_empty)
    output = (out_ptr, qk_scale, k_scale_ptr, v_scale_ptr, stride_out_token, stride_out_head)
    partial = (header_ptr, counters_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr)
    descs = (q_desc, key_desc, value_desc)
    step = (
        block_table_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, header_ptr, tile_rows_ptr, tile_indices_ptr,
        counters_ptr, num_slots, num_blocks, num_tokens, max_keys, stride_table,
    )  # fmt: skip
    registers: gl.constexpr = (3 * MAX_REGISTERS - PRODUCER_REGISTERS) // 16 * 8
    if WIDEN:
        raw_keys = gl.allocate_shared_memory(key_desc.dtype, [TILE, HEAD_PAD], key_desc.layout)
        raw_values = gl.allocate_shared_memory(value_desc.dtype, [TILE, HEAD_PAD], value_desc.layout)
        raw_tiles = (raw_keys, raw_values, copied.index(0), copied.index(1))
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        shared, turns, output, partial, (sinks_ptr, softcap, window), 0, GROUP, HEADS, TOKENS, HEAD_DIM,
                        TILE, STAGES, PING_PONG, KEY_SCALE, VALUE_SCALE,
                    ),
                ),
                (
                    consume,
                    (
                        shared, turns, output, partial, (sinks_ptr, softcap, window), 1, GROUP, HEADS, TOKENS, HEAD_DIM,
                        TILE, STAGES, PING_PONG, KEY_SCALE, VALUE_SCALE,
                    ),
                ),
                (
                    produce_widened,
                    (
                        descs, shared, raw_tiles, step, window, NUM_KV_HEADS, GROUP, HEADS, TOKENS, HEAD_DIM, BLOCK_SIZE,
                        TILE, STAGES,
                    ),
                ),
            ],
            [4, 4],
            [registers, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        shared, turns, output, partial, (sinks_ptr, softcap, window), 0, GROUP, HEADS, TOKENS, HEAD_DIM,
                        TILE, STAGES, PING_PONG, KEY_SCALE, VALUE_SCALE,
                    ),
                ),
                (
                    consume,
                    (
                        shared, turns, output, partial, (sinks_ptr, softcap, window), 1, GROUP, HEADS, TOKENS, HEAD_DIM,
                        TILE, STAGES, PING_PONG, KEY_SCALE, VALUE_SCALE,
                    ),
                ),
                (
                    produce,
                    (
                        descs, shared, copied.index(0), step, window, NUM_KV_HEADS, GROUP, HEADS, TOKENS, HEAD_DIM, BLOCK_SIZE,
                        TILE, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [registers, PRODUCER_REGISTERS],
        )  # fmt: skip


def can_copy(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether TMA can read these: a token's heads side by side, whole caches of q's type or of 8 bits, lines aligned."""
    if k_cache.dtype != v_cache.dtype or not (k_cache.dtype == q.dtype or k_cache.dtype.itemsize == 1):
        return False
    if k_cache.shape[2] < 8 or q.stride(1) != q.shape[2]:
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
    config: HopperPrefillConfig,
    window: int = 0,
    shape: ScoreShape = PLAIN_SCORES,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Arguments as in `prefill_attention`, for tensors that satisfy `can_copy`, without ALiBi."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    num_slots, max_blocks = block_table.shape
    head_pad = triton.next_power_of_2(head_dim)  # elements beyond the end of a line are read as 0
    tokens = workspace.tile_tokens

    keys, values = (
        tma.lines(cache, num_blocks * num_kv_heads * block_size, head_dim, head_dim, (min(block_size, config.tile), head_pad))
        for cache in (k_cache, v_cache)
    )
    _kernel[(workspace.num_programs // workspace.config.programs_per_sm,)](
        tma.lines(q, num_tokens, num_heads * head_dim, q.stride(0), (tokens & -tokens, head_pad)),
        keys,
        values,
        out,
        workspace.header if k_scale is None else k_scale,
        workspace.header if v_scale is None else v_scale,
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
        shape.sinks,
        shape.softcap or None,
        window or None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=workspace.tile_heads,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        STAGES=config.stages,
        Q_STAGES=2 if head_pad <= 128 else 1,
        PING_PONG=config.ping_pong,
        PRODUCER_REGISTERS=WIDENING_REGISTERS if k_cache.dtype != q.dtype else config.producer_registers,
        KEY_SCALE=k_scale is not None,
        VALUE_SCALE=v_scale is not None,
        num_warps=4,
        maxnreg=MAX_REGISTERS.value,
    )
