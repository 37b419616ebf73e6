"""The table of GPUs that were not measured: tiles and limits that follow from the kernels, not from one GPU's libraries.

Values that depend on the number of SMs or on shared memory are computed where they are used, from the GPU at hand: programs of
attention and of `linear_hopper`, splits of a product, decode configurations that fit. There are no rules about cuBLAS: no
ranges of rows for cuBLASLt, no batches over K, no sizes to avoid. The tiles were found on an H200 (benchmarks/LOG.md).
"""

from quire.kernels.tuning.configs import (
    DecodeConfig,
    HopperPrefillConfig,
    PairConfig,
    PrefillConfig,
    RowConfig,
    SkinnyConfig,
    SplitConfig,
    TileConfig,
    TilesConfig,
    WideConfig,
    WideTile,
)
from quire.kernels.tuning.table import (
    ANY,
    BF16,
    AttentionTuning,
    DecodeRule,
    ElementwiseTuning,
    ExpertsTuning,
    HopperPrefillRule,
    LinearTuning,
    PrefillRule,
    SkinnyRule,
    SplitTuning,
    StepTuning,
    StreamTuning,
    Tuning,
)

SKINNY = (
    SkinnyRule(max_rows=1, min_k=4097, config=SkinnyConfig(False, 2, 2048, 4)),
    SkinnyRule(max_rows=1, min_k=4096, config=SkinnyConfig(False, 1, 4096, 8)),
    SkinnyRule(max_rows=1, min_k=2049, config=SkinnyConfig(False, 2, 4096, 8)),
    SkinnyRule(max_rows=1, min_k=1025, config=SkinnyConfig(False, 2, 2048, 4)),
    SkinnyRule(max_rows=1, config=SkinnyConfig(False, 4, 1024, 4)),
    SkinnyRule(max_rows=4, max_columns=1024, config=SkinnyConfig(False, 2, 1024, 4)),
    # few output columns: only tiles this small give enough programs
    SkinnyRule(max_rows=16, max_columns=1024, config=SkinnyConfig(True, 8, 512, 2, 3)),
    SkinnyRule(max_rows=16, max_columns=4096, min_k=4096, config=SkinnyConfig(True, 32, 512, 4, 3)),
    SkinnyRule(max_rows=16, max_columns=4096, config=SkinnyConfig(True, 32, 128, 4, 5)),
    SkinnyRule(max_rows=16, gated=True, max_weight=2**25, config=SkinnyConfig(True, 32, 128, 4, 5)),
    SkinnyRule(max_rows=16, gated=True, config=SkinnyConfig(True, 32, 128, 4, 3)),
    SkinnyRule(max_rows=16, max_weight=2**25, config=SkinnyConfig(True, 64, 128, 4, 5)),
    SkinnyRule(max_rows=16, config=SkinnyConfig(True, 64, 128, 4, 3)),
)

# Programs an SM, ascending. Few, each with more tiles in flight, are best where latency counts; many hide each other's latency
# at the beginning and end of rows.
_ONE = DecodeConfig(tile=64, num_warps=4, num_stages=4, programs_per_sm=1)
_TWO = DecodeConfig(tile=64, num_warps=4, num_stages=3, programs_per_sm=2, whole_tiles=4)
_FOUR = DecodeConfig(tile=64, num_warps=4, num_stages=2, programs_per_sm=4)

# More than 32 query rows mean speculative decoding with large groups: wgmma tiles. More than 64: twice the warps, as sums of
# 128 rows would take all registers of four warps (estimated).
DECODE = (
    DecodeRule(query_bytes=4, max_head_dim=128, min_query_rows=33, configs=(DecodeConfig(32, 8, 2, 2),)),
    DecodeRule(query_bytes=4, max_head_dim=128, configs=(DecodeConfig(32, 4, 2, 2),)),
    DecodeRule(query_bytes=4, max_head_dim=256, min_query_rows=33, configs=(DecodeConfig(16, 8, 2, 2),)),
    DecodeRule(query_bytes=4, max_head_dim=256, configs=(DecodeConfig(16, 4, 2, 2),)),
    DecodeRule(query_bytes=4, configs=(DecodeConfig(16, 8, 2, 1),)),
    DecodeRule(query_bytes=2, max_head_dim=128, min_query_rows=65, configs=(DecodeConfig(64, 8, 2, 1),)),
    DecodeRule(query_bytes=2, max_head_dim=128, min_query_rows=33, configs=(DecodeConfig(64, 4, 3, 1),)),
    # An 8-bit tile is half as many bytes to wait for: 8 rows of 7,100 keys take 36 us with two programs, 54 with one.
    DecodeRule(query_bytes=2, max_head_dim=128, cache_bytes=1, configs=(DecodeConfig(128, 4, 3, 2), _FOUR)),
    DecodeRule(query_bytes=2, max_head_dim=128, configs=(_ONE, _TWO, _FOUR)),
    DecodeRule(query_bytes=2, max_head_dim=256, min_query_rows=65, configs=(DecodeConfig(32, 8, 2, 1),)),
    DecodeRule(query_bytes=2, max_head_dim=256, min_query_rows=33, configs=(DecodeConfig(64, 8, 2, 1),)),
    DecodeRule(query_bytes=2, max_head_dim=256, configs=(DecodeConfig(64, 4, 3, 1),)),
    DecodeRule(query_bytes=2, configs=(DecodeConfig(32, 8, 2, 1),)),  # heads of 512: not measured
)

PREFILL = (
    # No tensor cores here: ieee dots are unrolled FMAs over operands in shared memory.
    PrefillRule(query_bytes=4, max_head_dim=128, config=PrefillConfig(32, 32, 4, 2, 2)),
    PrefillRule(query_bytes=4, max_head_dim=256, config=PrefillConfig(16, 16, 4, 2, 2)),
    PrefillRule(query_bytes=4, config=PrefillConfig(16, 16, 8, 2, 1)),
    # Two programs an SM, although with 128 registers a thread they spill and wait for each wgmma: one computes its softmax
    # while the other multiplies. One program with 3 stages: 426 TFLOP/s at 8 x 4096 tokens; two: 470; and 8 % less time at 512.
    PrefillRule(query_bytes=2, max_head_dim=64, config=PrefillConfig(128, 64, 8, 3, 2)),
    PrefillRule(query_bytes=2, max_head_dim=128, cache_bytes=1, config=PrefillConfig(128, 64, 8, 3, 2)),
    PrefillRule(query_bytes=2, max_head_dim=128, config=PrefillConfig(128, 64, 8, 2, 2)),
    PrefillRule(query_bytes=2, max_head_dim=256, config=PrefillConfig(128, 64, 8, 2, 1)),
    PrefillRule(query_bytes=2, config=PrefillConfig(64, 32, 8, 2, 1)),  # heads of 512: their sums fill the registers
)

# For Hopper's prefill attention with heads of over 128: tiles that fit into shared memory, and a producer that does not spill.
WIDE_HEADS = HopperPrefillConfig(tile=64, stages=2, ping_pong=False, producer_registers=40)

# If an expert gets few rows, the work is reading its weights: narrow tiles, several programs an SM. If many, wgmma.
EXPERTS = ExpertsTuning(
    pair_rows=4,  # at 4 rows of Qwen3-30B-A3B 76 us, in tiles 84; at 16 rows 279 and 197
    pair=PairConfig(gate_up_n=2, down_n=4, block_k=1024, num_warps=4),
    tiles=(
        (8.0, TilesConfig(16, True, TileConfig(32, 128, 4, 4), TileConfig(64, 128, 4, 4))),
        (24.0, TilesConfig(32, True, TileConfig(32, 128, 4, 4), TileConfig(64, 128, 4, 4))),
        (48.0, TilesConfig(64, True, TileConfig(64, 64, 4, 4), TileConfig(128, 64, 4, 4))),
        (float(ANY), TilesConfig(128, False, TileConfig(64, 64, 8, 3), TileConfig(128, 64, 8, 3))),
    ),
    exact=TilesConfig(16, True, TileConfig(32, 32, 4, 2), TileConfig(32, 32, 4, 2)),
    # Estimated: a program an SM for large tiles, two for small ones, which are bound by bytes up to 22 rows (16 bits: 26).
    wide=(
        (7.0, None),
        (10.0, WideConfig(16, WideTile(2, 1, 2), WideTile(1, 1, 2))),
        (26.0, WideConfig(32, WideTile(2, 1, 2), WideTile(1, 1, 2))),
        (52.0, WideConfig(64, WideTile(2, 1, 1), WideTile(2, 1, 1))),
        (float(ANY), WideConfig(128, WideTile(2, 1, 1), WideTile(2, 1, 1))),
    ),
    wide_four_bits=(
        (10.0, WideConfig(16, WideTile(2, 1, 2), WideTile(1, 1, 2))),
        (22.0, WideConfig(32, WideTile(1, 1, 2), WideTile(1, 1, 2))),
        (80.0, WideConfig(64, WideTile(1, 1, 2), WideTile(1, 1, 2))),
        (float(ANY), WideConfig(128, WideTile(2, 1, 1), WideTile(2, 1, 1))),
    ),
    # with 16 and 8 bits its gate and up take half as long again as those of `pairs`, which reads longer pieces of a row
    row=RowConfig(max_rows=4, gate_up_warps=0, down_warps=4, ahead=16),
    scaled_row=RowConfig(max_rows=4, gate_up_warps=0, down_warps=4, ahead=6),
    four_bits_row=RowConfig(max_rows=4, gate_up_warps=4, down_warps=4, ahead=12),
    router_rows=4,
)

DEFAULT = Tuning(
    devices=(),
    linear={
        BF16: LinearTuning(
            skinny=SKINNY,
            stream=StreamTuning(
                max_rows=64,
                min_columns=2048,  # 32 programs; fewer were not measured
                min_parts_columns=1025,
                block_k=128,
                sharing=1,
                gated_sharing=2,  # one loads while the other exchanges gate and up
                max_parts=((32, 8), (64, 4)),
            ),
            split=SplitTuning(
                config=SplitConfig(4, 32, 128, 4, 4),  # the best at 32 and at 64 rows
                small_columns=2048,
                small_weight=1 << 23,
                max_columns=4096,
                batched_small=(),
                batched_large=(),
            ),
            cublaslt_columns=4096,
            cublaslt_rows=(),
            norm_linear_weight=12 << 20,  # if W is larger, repeating the norm costs more than the launches saved
            norm_linear_tiles=((1024, 2, 2), (2048, 2, 4), (4096, 2, 8)),
        )
    },
    attention=AttentionTuning(
        decode=DECODE,
        prefill=PREFILL,
        prefill_hopper=(
            # a window of 128 keys, 16 tokens a tile: 206 keys on average; with tiles of 128 it would be 270
            HopperPrefillRule(
                max_head_dim=128,
                max_window=256,
                config=HopperPrefillConfig(tile=64, stages=3, ping_pong=True, producer_registers=24),
            ),
            HopperPrefillRule(
                max_head_dim=128, config=HopperPrefillConfig(tile=128, stages=2, ping_pong=True, producer_registers=24)
            ),
            HopperPrefillRule(config=WIDE_HEADS),
        ),
        min_split_tiles=8,
        # Few tokens are fastest with many small programs. With many, 8 elements a thread would be limited by the SMs' issue
        # rate, not by memory: 0.78 instructions an element (with QK-norm 1.13), most of them for addresses. With 16 elements it
        # is 0.53 (0.78).
        rope_tiles=((256, 1024), (ANY, 2048)),
    ),
    experts=EXPERTS,
    elementwise=ElementwiseTuning(norm_warp_elements=512, silu_block=1024, silu_warp_elements=256, embedding_block=4096),
    step=StepTuning(
        # Closer together where a row is a larger part of the step.
        decode_sizes=((1, 3, 1), (4, 8, 4), (8, 64, 8), (64, 256, 16), (256, 512, 32), (512, ANY, 64)),
        mixed_sizes=((16, 33, 16), (64, 512, 64), (512, 1024, 128), (1024, 4096, 256), (4096, ANY, 512)),
        slow_sizes=(),
        captured_tokens=2048,
        large_weights_bytes=16 * 10**9,  # such a model's GPU takes 45 ms for so many tokens, an eager step's launches 23 to 45
        early_rows=1,
        dependent_rows=16,
    ),
)
