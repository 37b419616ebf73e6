"""Hopper's prefill attention against the float64 oracle, on a GPU, and who takes it."""

import pytest
import torch
from attention_cases import GPU_PREFILL_ROWS, Case, assert_matches, run_prefill

pytest.importorskip("triton")

from quire.kernels.attention import prefill as attention_prefill
from quire.kernels.attention import prefill_schedule as attention_prefill_schedule
from quire.kernels.triton_support import hopper

MANY_CHUNKS = [(33 * i, 7 * i) for i in range(1, 90)]


@pytest.fixture
def on_hopper(monkeypatch):
    """Skips on another GPU; at the end, Hopper's kernel must have been called."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from quire.kernels.attention import prefill_hopper as kernel

    calls = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args, **kwargs: (calls.append(1), launch(*args, **kwargs)))
    yield
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [*GPU_PREFILL_ROWS.values(), MANY_CHUNKS], ids=[*GPU_PREFILL_ROWS, "many"])
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (4, 4, 128), (16, 1, 64), (6, 3, 64)])
def test_gpu_hopper_prefill_equals_reference(heads, rows, dtype, on_hopper):
    case = Case(rows, *heads, 64, dtype=dtype, device="cuda")
    assert_matches(run_prefill(case, hopper=True), case.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 16, 32, 128, 256])
def test_gpu_hopper_prefill_takes_any_block_size(block_size, on_hopper):
    rows = [(700, 300), (33, 33), (257, 257), (1, 1)]
    for seed in range(3):
        case = Case(rows, 8, 2, 64, block_size, dtype=torch.bfloat16, device="cuda", seed=seed)
        assert_matches(run_prefill(case, hopper=True), case.expected(), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(9000, 5)], [(30000, 100), (40, 3)], [(513, 1), (8192, 64), (2, 2)], [(511, 20)]])
@pytest.mark.parametrize("num_heads,num_kv_heads", [(16, 8), (4, 1), (2, 2)])
def test_gpu_hopper_prefill_splits_the_keys_of_few_queries(num_heads, num_kv_heads, rows, on_hopper):
    """Short prompts behind long ones, rows too short for as many parts as others have, and the counts are left at 0."""
    for seed in range(3):
        case = Case(rows, num_heads, num_kv_heads, 128, 64, dtype=torch.bfloat16, device="cuda", seed=seed)
        assert_matches(run_prefill(case, hopper=True), case.expected(), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", [2, 6, 100])
def test_gpu_hopper_prefill_is_the_same_for_any_number_of_programs(num_programs, on_hopper):
    """A program that gets no unit, one that gets them all; results do not depend on who computes a tile."""
    case = Case([(3000, 2000), (90, 90), (513, 513), (1500, 40)], 16, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    want = run_prefill(case, hopper=True).clone()
    assert_matches(want, case.expected(), torch.bfloat16)
    assert torch.equal(run_prefill(case, hopper=True, num_programs=num_programs), want)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [*GPU_PREFILL_ROWS.values(), [(9000, 5)], [(513, 1), (8192, 64), (2, 2)]])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 128), (16, 1, 64)])
def test_gpu_hopper_prefill_widens_caches_of_8_bits(heads, rows, cache_dtype, dtype, scaled, on_hopper):
    case = Case(rows, *heads, 64, dtype=dtype, cache_dtype=cache_dtype, device="cuda", scaled=scaled)
    assert_matches(run_prefill(case, hopper=True), case.expected(), dtype)


# ----------------------------------------------------------------------------------------------------- without a GPU
@pytest.mark.parametrize(
    "dtype,cache_dtype,head_dim,group,taken",
    [
        (torch.bfloat16, torch.bfloat16, 128, 4, True),
        (torch.float16, torch.float16, 64, 16, True),
        (torch.float32, torch.float32, 128, 4, False),
        (torch.bfloat16, torch.float8_e4m3fn, 128, 4, True),
        (torch.bfloat16, torch.float16, 128, 4, False),
        (torch.float32, torch.float8_e4m3fn, 128, 4, False),
        (torch.bfloat16, torch.bfloat16, 80, 4, False),
        (torch.bfloat16, torch.bfloat16, 128, 7, False),
    ],
)
def test_what_hopper_takes(dtype, cache_dtype, head_dim, group, taken, monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda device: True)
    assert attention_prefill_schedule._hopper_takes(torch.device("cuda"), dtype, cache_dtype, head_dim, group) is taken
    monkeypatch.setattr(hopper, "available", lambda device: False)
    assert not attention_prefill_schedule._hopper_takes(torch.device("cuda"), dtype, cache_dtype, head_dim, group)


def test_only_plain_calls_that_tma_can_read_go_to_hopper(monkeypatch):
    from quire.kernels.attention import prefill_hopper as kernel

    calls = []
    monkeypatch.setattr(attention_prefill_schedule, "_hopper_takes", lambda *args: True)
    monkeypatch.setattr(kernel, "launch", lambda *args, **kwargs: calls.append("hopper"))
    monkeypatch.setattr(attention_prefill, "_prefill_kernel", {(8,): lambda *args, **kwargs: calls.append("portable")})
    workspace = attention_prefill_schedule.PrefillWorkspace.allocate(
        4, 64, 4, 2, 64, "cpu", torch.bfloat16, num_programs=8, hopper=True
    )
    cache, ints = torch.zeros(4, 2, 16, 64).bfloat16(), torch.zeros(5, dtype=torch.int32)

    def run(q=None, cache=cache, **options):
        q = torch.zeros(8, 4, 64).bfloat16() if q is None else q
        calls.clear()
        attention_prefill.prefill_attention(
            q, cache, cache, torch.zeros(5, 4, dtype=torch.int32), ints[:4], ints, ints[:4], torch.zeros(8, 4, 64).bfloat16(),
            scale=0.1, workspace=workspace, **options,
        )  # fmt: skip
        return calls[0]

    one = torch.ones(1)
    assert run() == "hopper"
    assert run(window=5) == "portable" and run(k_scale=one) == run(v_scale=one) == "hopper"
    assert run(cache=torch.zeros(4, 2, 16, 64).to(torch.float8_e4m3fn)) == "hopper"
    assert run(cache=torch.zeros(4, 2, 16, 64).half()) == "portable"  # of another type
    assert run(torch.zeros(8, 5, 64).bfloat16()[:, :4]) == "hopper"  # a slice of qkv
    assert run(torch.zeros(8, 4 * 64 + 4).bfloat16()[:, : 4 * 64].unflatten(1, (4, 64))) == "portable"  # lines not aligned
    both = torch.zeros(4, 2, 2, 16, 64).bfloat16()
    assert run(cache=both[:, 0]) == "portable"  # not one matrix
