"""Decode attention of rows with up to 16 queries, where a program holds up to 128 rows of them."""

import pytest
import torch
from attention_cases import SHAPES, Case, assert_matches, run_decode


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [{}, SHAPES["all"]])
def test_interpreted_decode_takes_128_rows_of_queries(shape):
    from quire.kernels.attention.decode_schedule import MAX_QUERY_LEN, takes_queries
    from quire.kernels.tuning.configs import DecodeConfig

    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)
    case = Case([(40, 16), (9, 2), (17, 1)], 16, 2, 16, 16, 12, shape=shape)
    got = run_decode(case, config=config, num_programs=4, split_tokens=0)
    assert_matches(got, case.expected(), case.dtype)
    of_16_bits = [(64, 8), (128, 8), (256, 8), (512, 4), (64, 9), (512, 5)]  # head size, group
    assert [takes_queries(torch.float16, *x, MAX_QUERY_LEN) for x in of_16_bits] == [True] * 4 + [False] * 2
    assert not takes_queries(torch.float32, 64, 1, MAX_QUERY_LEN)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_heads,num_kv_heads,head_dim", [(32, 4, 64), (32, 8, 128), (16, 2, 128), (8, 1, 256), (8, 2, 512)])
def test_gpu_decode_takes_as_many_queries_as_rows_have(num_heads, num_kv_heads, head_dim, dtype):
    rows = [(700, 16), (33, 2), (0, 0), (90, 5), (9000, 16), (1, 1)]
    case = Case(rows, num_heads, num_kv_heads, head_dim, 64, dtype=dtype, device="cuda")
    assert_matches(run_decode(case, 16), case.expected(), dtype)
