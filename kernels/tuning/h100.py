"""NVIDIA H100 SXM: the H200's die with less memory, 132 SMs, 80 GB at 3.35 TB/s. Made by `benchmarks/tuning/tune.py` with torch
2.11 and Triton 3.6 (benchmarks/LOG.md); values that are not named here were measured, too, and equal the H200's.

With slower memory, one row needs more of a weight in flight, and products fewer splits: each costs a write and a read.
"""

from msgspec.structs import replace

from quire.kernels.tuning.configs import HopperPrefillConfig, SkinnyConfig
from quire.kernels.tuning.default import SKINNY, WIDE_HEADS
from quire.kernels.tuning.h200 import H200
from quire.kernels.tuning.table import BF16, HopperPrefillRule

_BASE = H200.linear[BF16]
_ONE_ROW = (  # by K: over 4096, 4096, over 2048, over 1024, fewer
    SkinnyConfig(False, 2, 2048, 4),
    SkinnyConfig(False, 1, 2048, 8),
    SkinnyConfig(False, 2, 2048, 4),
    SkinnyConfig(False, 1, 1024, 4),
    SkinnyConfig(False, 4, 512, 8),
)
_FOUR_ROWS = SkinnyConfig(False, 2, 2048, 4)
_DECODE = next(  # 16-bit queries and cache, heads of up to 128, one query a row
    rule for rule in H200.attention.decode if rule.fits(2, 2, 128, 1)
)
_DECODE_RULE = H200.attention.decode.index(_DECODE)

H100 = replace(
    H200,
    devices=("NVIDIA H100 80GB HBM3",),
    linear={
        BF16: replace(
            _BASE,
            skinny=(
                *(replace(rule, config=config) for rule, config in zip(SKINNY, (*_ONE_ROW, _FOUR_ROWS), strict=False)),
                *SKINNY[6:],
            ),
            stream=replace(_BASE.stream, gated_sharing=1, max_parts=((32, 4), (64, 4))),
            split=replace(
                _BASE.split,
                batched_small=((65, 176, 4), (177, 416, 2)),
                batched_large=((209, 288, 2), (321, 384, 2)),
            ),
            cublaslt_rows=((17, 352), (385, 448), (513, 640), (897, 960), (2049, 4096)),
            norm_linear_weight=1 << 22,
        )
    },
    attention=replace(
        H200.attention,
        decode=(
            *H200.attention.decode[:_DECODE_RULE],
            replace(_DECODE, configs=(_DECODE.configs[0], replace(_DECODE.configs[1], num_stages=2), *_DECODE.configs[2:])),
            *H200.attention.decode[_DECODE_RULE + 1 :],
        ),
        prefill_hopper=(
            HopperPrefillRule(
                max_head_dim=128, config=HopperPrefillConfig(tile=64, stages=3, ping_pong=False, producer_registers=24)
            ),
            HopperPrefillRule(config=WIDE_HEADS),
        ),
    ),
    step=replace(H200.step, slow_sizes=(288, 448)),  # cuBLAS takes longer than at the next larger size
)
