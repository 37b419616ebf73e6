"""Queries that see keys behind their own, as an image's do in Gemma: all ways to compute it against the float64 oracle."""

from dataclasses import replace

import pytest
import tiny_wrappers
import torch
from attention_cases import GPU_DTYPES, SHAPES, Case, assert_matches, run_cpu, run_prefill
from media_engine import MediaEngine, patches_of, prompt, reference, square_of

from quire.ipc.sampling import SamplingParams

# rows of (keys, queries), and (row, first, last position) of tokens that see each other
CASES = {
    "whole": ([(37, 37)], [(0, 0, 36)]),
    "first": ([(40, 40), (9, 9)], [(0, 0, 4), (1, 0, 7)]),
    "last_and_adjacent": ([(61, 61)], [(0, 20, 43), (0, 44, 52), (0, 54, 60)]),
    "begun_in_a_cached_block": ([(70, 22), (33, 1), (90, 45)], [(0, 40, 58), (2, 45, 45), (2, 46, 89)]),
    "long": ([(300, 280)], [(0, 21, 276)]),
    "beside_decode_rows": ([(50, 1), (3, 1), (77, 60), (0, 0)], [(2, 30, 49)]),
}


def case_of(name, **more):
    rows, ahead = CASES[name]
    return Case(rows, ahead=ahead, **more)


def without_padding(case, got):
    want = case.expected()
    for row, (keys, _) in enumerate(case.rows):
        if not keys:
            got[case.query_start[row] : case.query_start[row + 1]] = 0
    return got, want


@pytest.mark.parametrize("window", [0, 1, 13, 64])
@pytest.mark.parametrize("name", CASES)
def test_cpu(name, window):
    case = case_of(name, window=window)
    assert_matches(run_cpu(case), case.expected(), case.dtype)
    plain = replace(case, ahead=[])
    assert not torch.equal(plain.expected(), case.expected())


@pytest.mark.parametrize("shape", [SHAPES["softcap"], SHAPES["all"]], ids=["softcap", "all"])
@pytest.mark.parametrize("window", [0, 13])
def test_cpu_with_changed_scores(shape, window):
    case = case_of("last_and_adjacent", window=window, shape=shape)
    assert_matches(run_cpu(case), case.expected(), case.dtype)


def test_cpu_slices_long_spans():
    case = Case([(900, 700), (600, 600)], num_heads=2, num_kv_heads=1, ahead=[(0, 300, 850), (1, 200, 599)])
    assert_matches(run_cpu(case), case.expected(), case.dtype)


def test_cpu_rows_without_such_tokens_are_computed_as_ever():
    case = case_of("begun_in_a_cached_block")
    plain = replace(case, ahead=[])
    own = slice(int(case.query_start[1]), int(case.query_start[2]))
    assert torch.equal(run_cpu(case)[own], run_cpu(plain)[own])
    plain.last_visible = torch.zeros(plain.q.shape[0], dtype=torch.int32)
    assert torch.equal(run_cpu(plain), run_cpu(replace(case, ahead=[])))


@pytest.mark.interpret
@pytest.mark.parametrize("window,tile", [(0, 16), (20, 32), (9, 16)])
@pytest.mark.parametrize("name", CASES)
def test_interpreted_prefill(name, window, tile):
    from quire.kernels.tuning.configs import PrefillConfig

    case = case_of(name, window=window, num_heads=6, num_kv_heads=2, head_dim=24)
    got = run_prefill(case, config=PrefillConfig(16, tile, 4, 2, 1), num_programs=3)
    assert_matches(*without_padding(case, got), case.dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 150])
def test_interpreted_prefill_splits_the_keys(window):
    from quire.kernels.tuning.configs import PrefillConfig

    case = Case([(400, 9), (30, 3)], 2, 1, 16, 16, window, dtype=torch.float16, ahead=[(0, 393, 398)])
    got = run_prefill(case, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=17)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
def test_interpreted_prefill_leaves_hoppers_kernel_aside(monkeypatch):
    """The schedule may be that of the other kernel, which masks by a query's own position."""
    from quire.kernels.attention import prefill_schedule
    from quire.kernels.tuning.configs import PrefillConfig

    monkeypatch.setattr(prefill_schedule, "_hopper_supports", lambda *args: True)
    case = Case([(60, 50), (9, 9), (100, 30)], 11, 1, 16, 16, 40, ahead=[(0, 12, 44), (1, 3, 8), (2, 80, 99)])
    got = run_prefill(case, hopper=True, config=PrefillConfig(128, 16, 4, 2, 1), num_programs=3)
    assert_matches(got, case.expected(), case.dtype)


@pytest.mark.interpret
def test_interpreted_prefill_without_such_tokens_is_the_same_to_the_bit():
    from quire.kernels.tuning.configs import PrefillConfig

    options = {"config": PrefillConfig(16, 16, 4, 2, 1), "num_programs": 3}
    case = Case([(37, 37), (60, 9)], window=20)
    plain = run_prefill(case, **options).clone()
    case.last_visible = torch.zeros(46, dtype=torch.int32)
    assert torch.equal(run_prefill(case, **options), plain)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["gpu-gemma3-seen", "gpu-gemma4-seen"])
def test_prompts_with_images_in_the_interpreter(name, monkeypatch):
    """Beneath a whole engine: steps with an image, one of them beside a row that decodes."""
    from interpreted_engine import InterpretedDevice, emulate_gpu

    emulate_gpu(monkeypatch)
    image = square_of(3) if "gemma3" in name else patches_of(2, 4)
    parts, text = [[5, 81, 300, 17], image, [9, 8, 7]], [81, 300, 17, 222]
    options = {"budget": 16, "max_model_len": 64, "num_blocks": 24, "max_num_seqs": 3, "is_whole": True}
    engine = MediaEngine(tiny_wrappers.wrapped(name), make_device=InterpretedDevice, **options)
    found = engine.generate([prompt(text), prompt(*parts)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert found == [reference(name, [text], 4), reference(name, parts, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100, 1024])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("heads", [(8, 4, 256), (16, 4, 128), (8, 1, 512)])
def test_gpu_prefill(heads, dtype, window):
    case = Case(
        [(700, 1), (1300, 1000), (280, 280), (2000, 513), (33, 33)],
        *heads, 64, window, dtype, device="cuda", ahead=[(1, 310, 565), (1, 570, 825), (2, 0, 279), (3, 1500, 1999)],
    )  # fmt: skip
    for hopper in (False, True):
        assert_matches(run_prefill(case, hopper=hopper), case.expected(), dtype)
