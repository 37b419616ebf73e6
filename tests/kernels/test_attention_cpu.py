"""Paged attention against the float64 oracle: the CPU function.

Every cache is poisoned: all that no row may see (block 0, which stands for freed blocks, the tail of last blocks, blocks of
nobody) is NaN, and so is `out` before a call.
"""

import pytest
import torch
from attention_cases import CPU_ROWS, ODD_HEADS, SHAPES, Case, assert_matches, run_cpu

from quire.kernels.attention.attention_cpu import CpuAttentionPlan, attention_cpu


@pytest.mark.parametrize("window", [0, 1, 13, 64, -1])
@pytest.mark.parametrize("rows", CPU_ROWS.values(), ids=CPU_ROWS)
def test_cpu_equals_reference(rows, window):
    case = Case(rows, window=window)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.parametrize("window", [0, 13, -1])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", CPU_ROWS.values(), ids=CPU_ROWS)
def test_cpu_shapes_scores(rows, shape, window):
    case = Case(rows, num_heads=6, window=window, shape=shape)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.parametrize("num_heads,num_kv_heads,head_dim", ODD_HEADS)
def test_cpu_takes_any_head_shape(num_heads, num_kv_heads, head_dim):
    case = Case([(70, 1), (33, 12), (9, 9)], num_heads, num_kv_heads, head_dim, block_size=32)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cpu_takes_half_precision(dtype):
    case = Case([(70, 1), (33, 12), (9, 9)], head_dim=64, dtype=dtype)
    assert_matches(run_cpu(case), case.expected(), dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn])
def test_cpu_multiplies_a_quantised_cache_by_its_scales(cache_dtype):
    case = Case([(70, 1), (33, 12), (9, 9)], cache_dtype=cache_dtype, scaled=True)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


def test_cpu_takes_keys_and_values_of_one_tensor():
    case = Case([(70, 1), (33, 12), (9, 9)], interleaved=True, window=11)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.parametrize("window", [0, 100, -1])
def test_cpu_slices_long_chunks(window, monkeypatch):
    monkeypatch.setattr("quire.kernels.attention.attention_cpu._MASK_ELEMENTS_KEPT", 256 * 500)
    case = Case([(900, 700), (1, 1), (600, 600)], num_heads=2, num_kv_heads=1, window=window)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_row_does_not_depend_on_its_neighbours(dtype):
    rows = [(100, 1), (7, 1), (98, 1), (33, 12), (255, 1), (97, 1), (40, 40)]
    case = Case(rows, num_heads=8, head_dim=64, dtype=dtype)
    together = run_cpu(case).clone()
    for row, (keys, queries) in enumerate(rows):
        begin = int(case.query_start[row])
        plan = CpuAttentionPlan(
            case.block_table[case.row_slots[row : row + 1].long()], [keys], [queries], case.k_cache, dtype=dtype
        )
        alone = torch.empty(queries, *case.out.shape[1:], dtype=dtype)
        attention_cpu(case.q[begin : begin + queries], case.k_cache, case.v_cache, alone, plan, scale=case.scale)
        assert torch.equal(alone, together[begin : begin + queries])


def test_cpu_refuses_more_queries_than_keys():
    case = Case([(4, 4)])
    with pytest.raises(ValueError, match="5 queries but 4 keys"):
        CpuAttentionPlan(case.block_table, [4], [5], case.k_cache, dtype=case.dtype)
