"""Hopper's prefill attention against the float64 oracle, on a GPU, and who takes it."""

import itertools

import pytest
import torch
from attention_cases import GPU_PREFILL_ROWS, Case, assert_matches, run_prefill
from msgspec.structs import replace

pytest.importorskip("triton")

from quire.kernels.attention import prefill as attention_prefill
from quire.kernels.attention import prefill_schedule as attention_prefill_schedule
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.triton_support import hopper
from quire.kernels.tuning.current import using
from quire.kernels.tuning.default import DEFAULT
from quire.kernels.tuning.h100 import H100
from quire.kernels.tuning.h200 import H200
from quire.kernels.tuning.table import HopperPrefillRule

MANY_CHUNKS = [(33 * i, 7 * i) for i in range(1, 90)]
CAPPED_SINKS = {"softcap": 1.5, "sinks": True}


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


def differs(case: Case, got: torch.Tensor, **changes) -> bool:
    """Whether `got` is not what a case with another window or shape of scores would give."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(case, name, value)
        try:
            assert_matches(got, case.expected(), case.dtype)
        except AssertionError:
            return True
    return False


CHUNKS = [(500, 60), (65, 1), (2000, 513), (128, 128), (1000, 2)]
FEW_QUERIES = [(9000, 40), (70, 5), (5000, 33)]  # whose keys are in several parts
WHOLE = [(300, 300)] * 9
SMALL_WINDOWS, WINDOWS = [1, 2, 63, 64, 65, 127, 128, 129, 200], [300, 1000, 20000]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [*SMALL_WINDOWS, *WINDOWS])
@pytest.mark.parametrize("heads", [(8, 2, 128, 16), (8, 2, 128, 64), (8, 1, 64, 64)], ids=str)
def test_gpu_hopper_prefill_sees_its_window(heads, window, on_hopper):
    """Blocks before it are gone, and the tail of a last block is NaN."""
    for rows in (CHUNKS, FEW_QUERIES, WHOLE):
        case = Case(rows, *heads, window, dtype=torch.bfloat16, device="cuda")
        assert_matches(run_prefill(case, hopper=True), case.expected(), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [2, 5, 16, 17])
def test_gpu_hopper_prefill_sees_no_key_more_or_less_than_its_window(window, on_hopper):
    case = Case([(300, 300), (33, 33)], 8, 2, 128, 16, window, dtype=torch.bfloat16, device="cuda")
    got = run_prefill(case, hopper=True)
    assert not differs(case, got) and differs(case, got, window=window - 1) and differs(case, got, window=window + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape,heads,window,dtype",
    [
        ({"softcap": 1.5}, (8, 2, 128), 0, torch.bfloat16),
        ({"softcap": 1.5}, (8, 2, 128), 300, torch.float16),
        ({"softcap": 1.5}, (4, 2, 256), 0, torch.bfloat16),
        ({"softcap": 1.5}, (4, 2, 256), 100, torch.bfloat16),
        ({"sinks": True}, (16, 2, 64), 0, torch.bfloat16),
        ({"sinks": True}, (16, 2, 64), 100, torch.float16),
        (CAPPED_SINKS, (8, 2, 128), 100, torch.bfloat16),
        (CAPPED_SINKS, (4, 2, 256), 0, torch.float16),
    ],
    ids=str,
)
def test_gpu_hopper_prefill_shapes_scores(shape, heads, window, dtype, on_hopper):
    for rows in (CHUNKS, FEW_QUERIES, WHOLE):
        case = Case(rows, *heads, 64, window, dtype=dtype, device="cuda", shape=shape)
        got = run_prefill(case, hopper=True)
        assert_matches(got, case.expected(), dtype)
    for name in shape:
        assert differs(case, got, shape={key: value for key, value in shape.items() if key != name})


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_gpu_hopper_prefill_with_sinks_of_no_weight_or_all(sink, on_hopper):
    case = Case([(700, 300), (9000, 5)], 8, 1, 64, 64, 1000, dtype=torch.bfloat16, device="cuda", shape={"sinks": sink})
    got = run_prefill(case, hopper=True)
    assert_matches(got, case.expected(), case.dtype)
    assert bool(got.any()) == (sink < 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*GPU_PREFILL_ROWS.values(), [(9000, 5)], [(513, 1), (8192, 64), (2, 2)]])
@pytest.mark.parametrize(
    "heads,window",
    [
        ((3, 1, 128), 0),
        ((6, 2, 128), 150),
        ((10, 2, 64), 0),
        ((7, 1, 128), 0),
        ((14, 2, 64), 150),
        ((12, 2, 64), 0),
        ((71, 1, 64), 0),
        ((22, 2, 128), 150),
        ((2, 1, 256), 0),
        ((5, 1, 256), 0),
        ((6, 2, 192), 150),
        ((4, 4, 80), 0),
        ((2, 2, 96), 150),
        ((8, 2, 112), 0),
        ((5, 1, 160), 0),
    ],
    ids=str,
)
def test_gpu_hopper_prefill_takes_any_group_and_size_of_heads(heads, window, rows, on_hopper):
    case = Case(rows, *heads, 64, window, dtype=torch.bfloat16, device="cuda")
    assert_matches(run_prefill(case, hopper=True), case.expected(), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads,cache_dtype",
    [
        ((3, 1, 128), torch.float8_e4m3fn),
        ((4, 2, 256), torch.float8_e5m2),
        ((8, 8, 96), torch.float8_e4m3fn),
        ((71, 1, 64), torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_gpu_hopper_prefill_of_8_bits_does_all_of_this(heads, cache_dtype, on_hopper):
    options = {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "device": "cuda", "scaled": True}
    for rows in (CHUNKS, FEW_QUERIES, WHOLE):
        for case in (Case(rows, *heads, 16, 130, shape=CAPPED_SINKS, **options), Case(rows, *heads, 64, **options)):
            assert_matches(run_prefill(case, hopper=True), case.expected(), case.dtype)


# ----------------------------------------------------------------------------------------------------- without a GPU
@pytest.mark.parametrize(
    "dtype,cache_dtype,head_dim,taken",
    [
        (torch.bfloat16, torch.bfloat16, 128, True),
        (torch.float16, torch.float16, 64, True),
        (torch.float32, torch.float32, 128, False),
        (torch.bfloat16, torch.float8_e4m3fn, 128, True),
        (torch.bfloat16, torch.float16, 128, False),
        (torch.float32, torch.float8_e4m3fn, 128, False),
        (torch.bfloat16, torch.bfloat16, 80, True),
        (torch.bfloat16, torch.bfloat16, 256, True),
        (torch.bfloat16, torch.bfloat16, 32, False),
        (torch.bfloat16, torch.bfloat16, 288, False),
        (torch.bfloat16, torch.bfloat16, 104, False),  # lines of 8 bits would not be aligned
    ],
)
def test_what_hopper_takes(dtype, cache_dtype, head_dim, taken, monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda device: True)
    assert attention_prefill_schedule._hopper_supports(torch.device("cuda"), dtype, cache_dtype, head_dim) is taken
    monkeypatch.setattr(hopper, "available", lambda device: False)
    assert not attention_prefill_schedule._hopper_supports(torch.device("cuda"), dtype, cache_dtype, head_dim)


def test_query_tiles_of_hopper_leave_few_rows_idle():
    tiles = {1: (1, 128), 2: (2, 64), 3: (3, 40), 4: (4, 32), 5: (5, 24), 6: (3, 40), 7: (7, 16), 8: (8, 16), 12: (4, 32)}
    tiles |= {16: (16, 8), 32: (16, 8), 71: (8, 16)}
    for group in range(1, 129):
        heads, tokens = attention_prefill_schedule.hopper_tile(group)
        used = group / -(-group // heads) * tokens
        assert (heads, tokens) == tiles.get(group, (heads, tokens)) and tokens % 8 == 0 and used >= 0.8 * 128


@pytest.mark.parametrize("table", [DEFAULT, H200, H100])
def test_every_layer_of_16_bits_finds_a_rule(table):
    for cache_bytes, dim, group, window, is_capped in itertools.product(
        (1, 2), (64, 128, 256), (1, 71), (0, 128), (True, False)
    ):
        rules = [rule for rule in table.attention.prefill_hopper if rule.fits(cache_bytes, dim, group)]
        config = next(rule.config for rule in rules if rule.fits_scores(window, is_capped))
        assert config is None or config.tile == (64 if dim > 128 or window or table is H100 else 128)


def test_only_calls_that_tma_can_read_and_a_rule_gives_it_go_to_hopper(monkeypatch):
    from quire.kernels.attention import prefill_hopper as kernel

    calls = []
    monkeypatch.setattr(attention_prefill_schedule, "_hopper_supports", lambda *args: True)
    monkeypatch.setattr(kernel, "launch", lambda *args, **kwargs: calls.append("hopper"))
    monkeypatch.setattr(attention_prefill, "_prefill_kernel", {(8,): lambda *args, **kwargs: calls.append("portable")})
    config = H200.attention.prefill_hopper[-1].config
    rules = (
        HopperPrefillRule(max_window=4, config=None),
        HopperPrefillRule(capped=True, max_window=100, config=None),
        HopperPrefillRule(config=config),
    )
    with using(replace(H200, attention=replace(H200.attention, prefill_hopper=rules))):
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
    assert run(k_scale=one) == run(v_scale=one) == "hopper"
    assert run(window=4) == "portable" and run(window=5) == "hopper"
    assert run(window=5, shape=ScoreShape(softcap=1.0)) == "portable" and run(shape=ScoreShape(softcap=1.0)) == "hopper"
    assert run(shape=ScoreShape(sinks=torch.ones(4))) == "hopper" and run(shape=ScoreShape(slopes=torch.ones(4))) == "portable"
    assert run(cache=torch.zeros(4, 2, 16, 64).to(torch.float8_e4m3fn)) == "hopper"
    assert run(cache=torch.zeros(4, 2, 16, 64).half()) == "portable"  # of another type
    assert run(torch.zeros(8, 5, 64).bfloat16()[:, :4]) == "hopper"  # a slice of qkv
    assert run(torch.zeros(8, 4 * 64 + 4).bfloat16()[:, : 4 * 64].unflatten(1, (4, 64))) == "portable"  # lines not aligned
    both = torch.zeros(4, 2, 2, 16, 64).bfloat16()
    assert run(cache=both[:, 0]) == "portable"  # not one matrix
