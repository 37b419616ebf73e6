"""Paged attention against the float64 oracle: the Triton kernels, in the interpreter and on a GPU.

Every cache is poisoned: all that no row may see (block 0, which stands for freed blocks, the tail of last blocks, blocks of
nobody) is NaN, and so is `out` before a call.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    GPU_DECODE_ROWS,
    GPU_DTYPES,
    GPU_PREFILL_ROWS,
    INTERPRET_DECODE_ROWS,
    ODD_HEADS,
    SHAPES,
    Case,
    assert_matches,
    run_decode,
    run_prefill,
)


def check_steps_of_one_workspace(steps: list[list[tuple[int, int]]], device: str, dtype: torch.dtype, **shape: int) -> None:
    """Steps of different numbers of rows, so of different configurations, share partial sums, counts and schedule."""
    from quire.kernels.attention.decode import decode_attention
    from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule

    cases = [Case(rows, device=device, dtype=dtype, seed=seed, **shape) for seed, rows in enumerate(steps)]
    heads = cases[0].num_heads, cases[0].num_kv_heads, cases[0].head_dim
    workspace = DecodeWorkspace.allocate(max(map(len, steps)), *heads, 1, device, dtype)
    workspace.partial_out.fill_(float("nan"))
    schedule = workspace.new_schedule()
    for case in cases:
        case.out.fill_(float("nan"))
        decode_schedule(workspace, schedule, case.query_start, case.seq_lens, len(case.rows), case.max_blocks * case.block_size)
        decode_attention(*case.tensors, scale=case.scale, workspace=workspace, schedule=schedule)
        assert_matches(case.out, case.expected(), dtype)
        assert not workspace.arrivals.any()
    assert {workspace.launch(len(rows)) for rows in steps} == set(workspace.configs)


def run_mixed(case: Case, num_decode: int, decode_options: dict, prefill_options: dict) -> torch.Tensor:
    """Both kernels over all rows, with the border between them known on the device only."""
    limit = torch.tensor([num_decode], dtype=torch.int32, device=case.device)
    tokens = int(case.query_start[num_decode])
    max_query_len = max(queries for _keys, queries in case.rows[:num_decode])
    out = run_decode(case, max_query_len, limit, **decode_options).clone()
    assert out[tokens:].isnan().all()
    both = run_prefill(case, limit, **prefill_options)
    assert both[:tokens].isnan().all()
    both[:tokens] = out[:tokens]
    return both


@pytest.mark.interpret
@pytest.mark.parametrize("split_tokens", [0, 16])
@pytest.mark.parametrize("window", [0, 9, -1])
@pytest.mark.parametrize("rows", INTERPRET_DECODE_ROWS.values(), ids=INTERPRET_DECODE_ROWS)
def test_interpreted_decode_equals_reference(rows, window, split_tokens):
    from quire.kernels.tuning.configs import DecodeConfig

    case = Case(rows, window=window, block_size=16)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)
    got = run_decode(case, config=config, num_programs=5, split_tokens=split_tokens, fixed_splits=2)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("num_programs", [1, 2, 30])
@pytest.mark.parametrize("block_size,num_heads,num_kv_heads,head_dim", [(16, 3, 1, 24), (64, 5, 5, 16)])
def test_interpreted_decode_splits_by_load(num_programs, block_size, num_heads, num_kv_heads, head_dim):
    from quire.kernels.tuning.configs import DecodeConfig

    config = DecodeConfig(tile=32, num_warps=4, num_stages=2, programs_per_sm=1)
    case = Case([(100, 1), (0, 1), (3, 1), (65, 1)], num_heads, num_kv_heads, head_dim, block_size, scaled=True)
    got = run_decode(case, config=config, num_programs=num_programs, split_tokens=0)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("keys,max_queries", [(700, 1), (513, 2)])
def test_interpreted_decode_adds_up_many_parts(keys, max_queries):
    from quire.kernels.tuning.configs import DecodeConfig

    config = DecodeConfig(tile=32, num_warps=4, num_stages=2, programs_per_sm=1)
    case = Case([(keys, max_queries), (40, 1)], 3, 1, 24, 16)
    case.tensors[0].mul_(8)  # the parts' shares of the whole differ by far
    got = run_decode(case, config=config, num_programs=24, split_tokens=0)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 9, -1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_size,tile,num_heads,num_kv_heads,head_dim", [(16, 32, 3, 1, 24), (32, 16, 4, 4, 16)])
def test_interpreted_prefill_equals_reference(window, block_size, tile, num_heads, num_kv_heads, head_dim):
    from quire.kernels.tuning.configs import PrefillConfig

    rows = [(1, 1), (37, 37), (60, 9), (0, 3), (48, 20)]
    case = Case(rows, num_heads, num_kv_heads, head_dim, block_size, window)
    got = run_prefill(case, config=PrefillConfig(16, tile, 4, 2, 1), num_programs=3)
    want = case.expected()
    got[47:50] = want[47:50] = 0  # a padded row: ignored
    assert_matches(got, want, case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("heads,shape", [((6, 2), {}), ((11, 1), SHAPES["all"]), ((9, 1), {"sinks": True})])
def test_interpreted_prefill_takes_the_query_tiles_of_another_kernel(heads, shape, monkeypatch):
    """Parts of a group, the last of which may be smaller, and rows of a tile that belong to nobody."""
    from quire.kernels.attention import prefill_schedule
    from quire.kernels.tuning.configs import PrefillConfig

    monkeypatch.setattr(prefill_schedule, "_hopper_supports", lambda *args: True)
    monkeypatch.setattr(prefill_schedule.PrefillWorkspace, "hopper_config", lambda *args: None)
    case = Case([(60, 50), (9, 9), (100, 3)], *heads, 16, 16, 40, shape=shape)
    got = run_prefill(case, hopper=True, config=PrefillConfig(128, 16, 4, 2, 1), num_programs=3)
    assert_matches(got, case.expected(), case.dtype)
    case = Case([(200, 3)], *heads, 16, 16, shape=shape, dtype=torch.float16)  # whose keys are in parts, too
    got = run_prefill(case, hopper=True, config=PrefillConfig(128, 16, 4, 2, 1), num_programs=17)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 150])
def test_interpreted_prefill_splits_the_keys_of_few_queries(window):
    from quire.kernels.tuning.configs import PrefillConfig

    case = Case([(400, 5), (30, 3)], 2, 1, 16, 16, window, dtype=torch.float16)
    got = run_prefill(case, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=9)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("lengths", [[100, 40], [100, 100, 100], [33, 200, 7, 90, 65]])
@pytest.mark.parametrize("num_programs", [1, 5, 13, *(pytest.param(programs, marks=pytest.mark.slow) for programs in (3, 8))])
def test_interpreted_decode_cuts_rows_anywhere(lengths, num_programs):
    """Aligned to (row, head), rounded up, and equal to within one unit: every way of the schedule."""
    from quire.kernels.tuning.configs import DecodeConfig

    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)
    case = Case([(n, 1) for n in lengths])
    got = run_decode(case, config=config, num_programs=num_programs, split_tokens=0)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
def test_interpreted_steps_of_all_configurations_share_a_workspace(monkeypatch):
    two_sms = type("Properties", (), {"multi_processor_count": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: two_sms)
    steps = [[(300, 1)], [(400, 1), (1, 1), (70, 1), (129, 1), (64, 1)], [(90, 1), (200, 1)], [(65, 1)], [(7, 1)] * 5]
    check_steps_of_one_workspace(steps, "cpu", torch.float16, num_heads=4, num_kv_heads=2, head_dim=16, block_size=64)


@pytest.mark.interpret
@pytest.mark.parametrize("num_decode", [1, 3])
def test_interpreted_mixed_step_is_cut_on_the_device(num_decode):
    from quire.kernels.tuning.configs import DecodeConfig, PrefillConfig

    case = Case([(40, 1), (3, 1), (20, 1), (33, 12), (9, 9)], cache_dtype=torch.float16, scaled=True)
    decode = {"config": DecodeConfig(16, 4, 2, 1), "num_programs": 3, "split_tokens": 0}
    prefill = {"config": PrefillConfig(16, 16, 4, 2, 1), "num_programs": 3}
    assert_matches(run_mixed(case, num_decode, decode, prefill), case.expected(), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1, 100, 1024])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", GPU_DECODE_ROWS.values(), ids=GPU_DECODE_ROWS)
def test_gpu_decode_equals_reference(rows, dtype, window):
    case = Case(rows, 16, 4, 128, 64, window, dtype, device="cuda")
    assert_matches(run_decode(case), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_steps_of_all_configurations_share_a_workspace(dtype):
    sizes = (1, 64, 16, 200, 17, 33, 5, 200, 1)
    steps = [[(1 + (977 * i + 131 * n) % 1500, 1) for i in range(n)] for n in sizes] + [[(9000, 1)]]
    check_steps_of_one_workspace(steps, "cuda", dtype, num_heads=32, num_kv_heads=8, head_dim=128, block_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1, 100, 1024])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", GPU_PREFILL_ROWS.values(), ids=GPU_PREFILL_ROWS)
def test_gpu_prefill_equals_reference(rows, dtype, window):
    case = Case(rows, 16, 4, 128, 64, window, dtype, device="cuda")
    assert_matches(run_prefill(case), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("num_heads,num_kv_heads,head_dim", ODD_HEADS)
def test_gpu_takes_any_head_shape(num_heads, num_kv_heads, head_dim, dtype):
    decode = Case([(700, 1), (33, 2), (90, 5), (1, 1)], num_heads, num_kv_heads, head_dim, 32, dtype=dtype, device="cuda")
    assert_matches(run_decode(decode), decode.expected(), dtype)
    prefill = Case([(300, 60), (33, 33), (1, 1)], num_heads, num_kv_heads, head_dim, 32, dtype=dtype, device="cuda")
    assert_matches(run_prefill(prefill), prefill.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_gpu_takes_any_block_size(block_size, dtype, window):
    decode = Case([(700, 1), (33, 1), (257, 1)], 8, 2, 64, block_size, window, dtype, device="cuda")
    assert_matches(run_decode(decode), decode.expected(), dtype)
    prefill = Case([(700, 300), (33, 33), (257, 257)], 8, 2, 64, block_size, window, dtype, device="cuda", interleaved=True)
    assert_matches(run_prefill(prefill), prefill.expected(), dtype)


@pytest.mark.interpret
def test_interpreted_keys_are_split_no_further_than_a_window_reaches():
    from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule
    from quire.kernels.tuning.configs import PrefillConfig

    case = Case([(900, 5), (30, 3)], dtype=torch.float16)
    config = PrefillConfig(16, 16, 4, 2, 1)
    workspace = PrefillWorkspace.allocate(3, 8, 4, 2, 16, "cpu", torch.float16, config=config, num_programs=64)
    splits = []
    for window in (0, 120, 250, 5000):
        prefill_schedule(workspace, case.query_start, case.seq_lens, 8, case.max_blocks * 16, window=window)
        splits.append(int(workspace.header[1]))
    assert splits == [8, 1, 3, 8]  # of 8 tiles of 16 keys, or more


@pytest.mark.parametrize("limit,programs_per_sm", [(227 << 10, [1, 2, 4]), (99 << 10, [2, 4]), (16 << 10, [4])])
def test_decode_leaves_out_what_the_gpus_shared_memory_does_not_hold(limit, programs_per_sm, monkeypatch):
    pytest.importorskip("triton")
    from quire.kernels.attention.decode_schedule import DecodeWorkspace

    properties = type("Properties", (), {"multi_processor_count": 2, "shared_memory_per_block_optin": limit})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: torch.zeros(1))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **options: torch.ones(1))
    workspace = DecodeWorkspace.allocate(4, 32, 8, 128, 1, "cuda", torch.bfloat16)
    assert [config.programs_per_sm for config, _programs in workspace.configs] == programs_per_sm


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_multiplies_a_quantised_cache_by_its_scales(dtype, cache_dtype):
    case = Case([(700, 1), (33, 1), (257, 1)], 16, 4, 128, 64, dtype=dtype, cache_dtype=cache_dtype, device="cuda", scaled=True)
    assert_matches(run_decode(case, cache_dtype=cache_dtype), case.expected(), dtype)
    case = replace(case, rows=[(700, 300), (33, 33), (257, 257)])
    for hopper in (False, True):  # whose kernel multiplies by no scales, and must not be taken
        assert_matches(run_prefill(case, hopper=hopper), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_decode", [1, 4])
def test_gpu_mixed_step_is_cut_on_the_device(num_decode, dtype):
    rows = [(700, 1), (33, 2), (257, 3), (9, 1), (700, 300), (33, 33), (257, 257)]
    case = Case(rows, 16, 4, 128, 64, dtype=dtype, device="cuda")
    for hopper in (False, True):
        assert_matches(run_mixed(case, num_decode, {}, {"hopper": hopper}), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,split_tokens", [(torch.float32, None), (torch.bfloat16, 512)])
def test_gpu_fixed_splits_make_a_row_independent_of_its_batch(dtype, split_tokens):
    rows = [(3000, 1), (7, 1), (12000, 1), (513, 1), (100, 1)]
    case = Case(rows, 16, 4, 128, 64, dtype=dtype, device="cuda")
    together = run_decode(case, split_tokens=split_tokens).clone()
    assert_matches(together, case.expected(), dtype)
    for row in range(len(rows)):
        alone = replace(case, rows=rows)
        alone.rows = [rows[row]]
        alone.row_slots, alone.seq_lens = case.row_slots[row : row + 1], case.seq_lens[row : row + 1]
        alone.query_start = case.query_start[:2]
        alone.q, alone.out = case.q[row : row + 1], torch.empty_like(case.out[:1])
        assert torch.equal(run_decode(alone, split_tokens=split_tokens)[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,hopper", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_gpu_graph_follows_changed_metadata(dtype, hopper):
    """Captured for 8 rows and 64 tokens; replayed for other mixes of rows, with the border on the device."""
    from quire.kernels.attention.decode import decode_attention
    from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule
    from quire.kernels.attention.prefill import prefill_attention
    from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule

    max_rows, max_tokens, max_keys = 8, 640, 4096
    mixes = [  # (rows, decode rows among them, then come padded rows)
        ([(700, 1), (33, 2), (257, 257), (900, 300)], 2),
        ([(4000, 1), (1, 1), (60, 1), (2000, 1), (64, 1)], 5),
        ([(500, 500)], 0),
        ([(5, 3), (129, 64), (80, 80), (81, 81), (1, 1), (300, 120), (301, 2)], 1),
    ]
    shape = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "block_size": 64, "dtype": dtype, "device": "cuda"}
    cases = [Case(rows, num_blocks=200, seed=seed, **shape) for seed, (rows, _decode) in enumerate(mixes)]
    k_cache, v_cache = torch.empty_like(cases[0].k_cache), torch.empty_like(cases[0].v_cache)
    q, out = (torch.zeros(max_tokens, 16, 128, dtype=dtype, device="cuda") for _ in range(2))

    def ints(*size):
        return torch.zeros(*size, dtype=torch.int32, device="cuda")

    table, slots, starts = ints(12, max_keys // 64), ints(max_rows), ints(max_rows + 1)
    seq_lens, limit = ints(max_rows), ints(1)
    decode = DecodeWorkspace.allocate(max_rows, 16, 4, 128, 3, "cuda", dtype)
    schedule = decode.new_schedule()
    prefill = PrefillWorkspace.allocate(max_rows, max_tokens, 16, 4, 128, "cuda", dtype, hopper=hopper)

    def step():
        tensors = q, k_cache, v_cache, table, slots, starts, seq_lens, out
        decode_schedule(decode, schedule, starts, seq_lens, max_tokens, max_keys, limit)
        prefill_schedule(prefill, starts, seq_lens, max_tokens, max_keys, limit)
        decode_attention(*tensors, scale=128**-0.5, workspace=decode, schedule=schedule)
        prefill_attention(*tensors, scale=128**-0.5, workspace=prefill)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case, (rows, num_decode) in zip(cases, mixes, strict=True):
        tokens = case.q.shape[0]
        k_cache.copy_(case.k_cache)
        v_cache.copy_(case.v_cache)
        table.zero_()
        table[: case.block_table.shape[0], : case.max_blocks] = case.block_table
        slots.zero_()[: len(rows)] = case.row_slots
        seq_lens.zero_()[: len(rows)] = case.seq_lens
        starts.fill_(tokens)[: len(rows) + 1] = case.query_start
        q.fill_(float("nan"))[:tokens] = case.q
        limit.fill_(num_decode)
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert_matches(replayed[:tokens], case.expected(), dtype)
        assert replayed[tokens:].isnan().all()
        out.fill_(float("nan"))
        step()
        assert torch.equal(out[:tokens], replayed[:tokens])


@pytest.mark.gpu
def test_gpu_offsets_into_a_cache_over_2_to_the_31_elements():
    shape = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    for block_size in (16, 64):
        num_blocks = 2**31 // (8 * block_size * 128) + 5000
        decode = Case([(700, 1), (33, 1), (4000, 1)], block_size=block_size, num_blocks=num_blocks, **shape)
        assert decode.k_cache.numel() > 2**31
        assert_matches(run_decode(decode), decode.expected(), torch.bfloat16)
        del decode
        prefill = Case([(700, 300), (33, 33), (257, 257)], block_size=block_size, num_blocks=num_blocks, **shape)
        for hopper in (False, True):
            assert_matches(run_prefill(prefill, hopper=hopper), prefill.expected(), torch.bfloat16)
        del prefill


@pytest.mark.gpu
def test_gpu_garbage_in_tables_stays_in_bounds():
    """Slots and lengths out of range are clamped: results mean nothing, but no address leaves the tensors."""
    case = Case([(700, 1), (33, 1)], 16, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    case.block_table.fill_(-(2**30))
    case.row_slots.fill_(2**30)
    case.seq_lens.fill_(2**30)
    run_decode(case)
    for hopper in (False, True):
        run_prefill(case, hopper=hopper)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 60])
def test_gpu_dependent_launch_changes_nothing(rows, mode):
    from quire.kernels.attention.decode import decode_attention
    from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule

    lengths = [(9000, 1), (33, 1), (700, 1)] * 20
    case = Case(lengths[:rows], 16, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    workspace = DecodeWorkspace.allocate(rows, 16, 4, 128, 1, "cuda", torch.bfloat16)
    schedule = workspace.new_schedule()
    decode_schedule(workspace, schedule, case.query_start, case.seq_lens, rows, case.max_blocks * 64)
    for _layer in range(20):
        decode_attention(*case.tensors, scale=case.scale, workspace=workspace, schedule=schedule, dependent_launch=mode)
    assert_matches(case.out, case.expected(), torch.bfloat16)
