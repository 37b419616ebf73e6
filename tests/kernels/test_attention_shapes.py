"""Softcap, ALiBi and attention sinks in the Triton kernels, against the float64 oracle. Cases and poison: test_attention.py."""

import pytest
import torch
from attention_cases import GPU_DTYPES, SHAPES, Case, assert_matches, run_decode, run_prefill

QUICK = (("rounded_alibi", 0), ("sinks", 0), ("all", 9))
CASES = [
    pytest.param(SHAPES[name], window, id=f"{name}-{window}", marks=() if (name, window) in QUICK else pytest.mark.slow)
    for name in SHAPES
    for window in (0, 9)
]


@pytest.mark.interpret
@pytest.mark.parametrize(("shape", "window"), CASES)
def test_interpreted_shapes_of_scores(shape, window):
    """Softcap, ALiBi and sinks, with the keys of a row in one part and in several, for odd groups and padded rows."""
    from quire.kernels.tuning.configs import DecodeConfig, PrefillConfig

    decode = Case([(75, 1), (0, 1), (33, 1), (1, 1)], 6, 2, 24, 16, window, shape=shape)
    for options in ({"num_programs": 1, "split_tokens": 0}, {"num_programs": 9, "split_tokens": 16, "fixed_splits": 3}):
        got = run_decode(decode, config=DecodeConfig(16, 4, 2, 1), **options)
        assert_matches(got, decode.expected(), decode.dtype)
    prefill = Case([(37, 37), (60, 9)], 3, 1, 24, 16, window, shape=shape)
    assert_matches(
        run_prefill(prefill, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=2), prefill.expected(), torch.float32
    )
    split = Case([(400, 5), (30, 3)], 2, 1, 16, 16, window, torch.float16, shape=shape)
    got = run_prefill(split, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=9)
    assert_matches(got, split.expected(), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_shapes_of_scores(shape, dtype, window):
    for heads in ((16, 4, 128), (10, 2, 256), (71, 1, 64)):
        decode = Case([(700, 1), (33, 1), (1, 1), (5000, 1)], *heads, 64, window, dtype, device="cuda", shape=shape)
        assert_matches(run_decode(decode), decode.expected(), dtype)
        prefill = Case([(300, 60), (333, 333), (1, 1)], *heads, 64, window, dtype, device="cuda", shape=shape)
        for hopper in (False, True):
            assert_matches(run_prefill(prefill, hopper=hopper), prefill.expected(), dtype)
