"""Attention within chunks (Llama 4): a query sees what its chunk has up to itself. Against the oracle, that against a mask."""

import pytest
import torch
from attention_cases import (
    CPU_ROWS,
    GPU_DECODE_ROWS,
    GPU_DTYPES,
    GPU_PREFILL_ROWS,
    INTERPRET_DECODE_ROWS,
    SHAPES,
    Case,
    assert_matches,
    run_cpu,
    run_decode,
    run_prefill,
)


def chunked(rows, size, *args, **changes) -> Case:
    return Case(rows, *args, window=size, is_chunked=True, **changes)


def test_the_oracle_is_a_mask_over_the_whole():
    case = chunked([(23, 23)], 7, num_heads=2, num_kv_heads=2)
    k, v = (
        (x[case.block_table[case.row_slots[0], :2].long()].transpose(1, 2).flatten(0, 1)[:23])
        for x in (case.k_cache, case.v_cache)
    )
    at = torch.arange(23)
    hidden = (at[None] > at[:, None]) | (at[None] // 7 != at[:, None] // 7)
    scores = (torch.einsum("qhd,khd->hqk", case.q, k) * case.scale).masked_fill(hidden, float("-inf"))
    assert_matches(case.expected(), torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), case.dtype)


@pytest.mark.parametrize("size", [1, 13, 64])
@pytest.mark.parametrize("rows", CPU_ROWS.values(), ids=CPU_ROWS)
def test_cpu_equals_reference(rows, size):
    case = chunked(rows, size)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


def test_cpu_shapes_scores_and_slices_long_chunks(monkeypatch):
    monkeypatch.setattr("quire.kernels.attention.attention_cpu._MASK_ELEMENTS_KEPT", 256 * 500)
    case = chunked([(900, 700), (1, 1), (600, 600)], 100, num_heads=2, num_kv_heads=1, shape=SHAPES["all"])
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("split_tokens", [0, 16])
@pytest.mark.parametrize("size", [9, 16, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", INTERPRET_DECODE_ROWS.values(), ids=INTERPRET_DECODE_ROWS)
def test_interpreted_decode_equals_reference(rows, size, split_tokens):
    from quire.kernels.tuning.configs import DecodeConfig

    case = chunked(rows, size, block_size=16)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)
    got = run_decode(case, config=config, num_programs=5, split_tokens=split_tokens, fixed_splits=2)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("size", [9, 32, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_size,tile,num_heads,num_kv_heads,head_dim", [(16, 32, 3, 1, 24), (32, 16, 4, 4, 16)])
def test_interpreted_prefill_equals_reference(size, block_size, tile, num_heads, num_kv_heads, head_dim):
    from quire.kernels.tuning.configs import PrefillConfig

    case = chunked([(1, 1), (37, 37), (60, 9), (48, 20)], size, num_heads, num_kv_heads, head_dim, block_size)
    got = run_prefill(case, config=PrefillConfig(16, tile, 4, 2, 1), num_programs=3)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
def test_interpreted_prefill_splits_the_keys_of_few_queries():
    from quire.kernels.tuning.configs import PrefillConfig

    case = chunked([(397, 5), (30, 3)], 150, 2, 1, 16, 16, dtype=torch.float16)
    got = run_prefill(case, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=9)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 100, 128, 1000])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", GPU_DECODE_ROWS.values(), ids=GPU_DECODE_ROWS)
def test_gpu_decode_equals_reference(rows, dtype, size):
    case = chunked(rows, size, 10, 2, 128, 64, dtype=dtype, device="cuda")
    assert_matches(run_decode(case), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("size", [1, 100, 128, 1000])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", GPU_PREFILL_ROWS.values(), ids=GPU_PREFILL_ROWS)
def test_gpu_prefill_equals_reference(rows, dtype, size, hopper):
    case = chunked(rows, size, 10, 2, 128, 64, dtype=dtype, device="cuda")
    assert_matches(run_prefill(case, hopper=hopper), case.expected(), dtype)
