"""NVIDIA H200: 132 SMs, 141 GB at 4.8 TB/s. Measured with torch 2.11 and Triton 3.6 (benchmarks/LOG.md)."""

from msgspec.structs import replace

from quire.kernels.tuning.default import DEFAULT
from quire.kernels.tuning.table import ANY, BF16

_BASE = DEFAULT.linear[BF16]

H200 = replace(
    DEFAULT,
    devices=("NVIDIA H200",),
    linear={
        BF16: replace(
            _BASE,
            # At 1024 and at 4096 columns: o_proj and down_proj of Qwen3-0.6B and Llama-3.1-8B.
            split=replace(_BASE.split, batched_small=((65, 160, 4), (161, 400, 2)), batched_large=((113, 304, 2),)),
            # Over all of a layer's products of Llama-3.1-8B: cuBLASLt takes 1 to 6 % less time at 17 to 240 rows and at 272 to
            # 624, 2 to 3 % less from 2048 rows on, up to 2 % more between; at 1024 columns there is no difference.
            cublaslt_rows=((17, 240), (272, 624), (2048, ANY)),
        )
    },
    # Over all the 8B's layers: fp8 takes 10 to 40 % less time than cuBLAS at 64 rows, up to 20 % more at 80 except for gate_up;
    # with 2-D scale groups as long as cuBLAS at 64. int8 takes 10 to 40 % less than torch._int_mm at 128 to 512 rows.
    scaled=replace(DEFAULT.scaled, int8_rows=ANY, fused_weight=1 << 24),
    step=replace(DEFAULT.step, slow_sizes=(448,)),  # cuBLAS takes 268 us for the 8B's gate_up, at 480 rows 160
)
