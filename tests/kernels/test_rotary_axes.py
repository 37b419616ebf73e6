"""Rotary positions with several axes: rope_kv and the kernels beneath a whole engine, in Triton's interpreter."""

import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, image_of, prompt, reference
from test_rope_kv import TOLERANCE, case

from quire.ipc.sampling import SamplingParams
from quire.kernels.attention import rope_kv_cpu, rope_kv_reference

SHAPES = [(1, 1, 1, 12, 12, 1), (5, 3, 2, 24, 24, 4), (7, 8, 1, 64, 32, 16)]
TEXT = [5, 81, 300, 17, 222, 4, 99]


def with_axes(shape, dtype, device, **more):
    args = case(shape, dtype, device, **more)
    generator = torch.Generator().manual_seed(3)
    args["positions"] = torch.randint(0, 50, (3, shape[0]), generator=generator, dtype=torch.int32).to(device)
    args["axes"] = torch.tensor([(0, 1, 2, 1)[i % 4] for i in range(shape[4] // 2)], dtype=torch.int32, device=device)
    return args


def compare(shape, dtype, device):
    from quire.kernels.attention import rope_kv

    ours, theirs = with_axes(shape, dtype, device), with_axes(shape, dtype, device)
    rope_kv.rope_kv(**ours)
    rope_kv_reference.rope_kv(**theirs)
    for name in ("qkv", "k_cache", "v_cache"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    plain = case(shape, dtype, device)
    rope_kv_reference.rope_kv(**plain)
    assert shape[0] == 1 or not torch.equal(plain["qkv"], theirs["qkv"])


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_turn_by_their_axes_in_the_interpreter(shape):
    compare(shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_turn_by_their_axes(shape, dtype):
    compare(shape, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_axes_are_plain_positions(shape):
    args, plain = with_axes(shape, torch.float32, "cpu"), case(shape, torch.float32, "cpu")
    args["positions"] = plain["positions"].expand(3, -1).contiguous()
    at, table = plain["positions"].numpy(), plain["cos_sin"]
    found = rope_kv_cpu.rotations(table, args["positions"].numpy(), axes=args["axes"].tolist())
    for ours, theirs in zip(found, rope_kv_cpu.rotations(table, at), strict=True):
        assert (ours == theirs).all() if hasattr(ours, "all") else ours == theirs
    for one in (args, plain):
        rope_kv_reference.rope_kv(**one)
    assert torch.equal(args["qkv"], plain["qkv"]) and torch.equal(args["k_cache"], plain["k_cache"])


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["gpu-qwen2.5-vl-seen", "gpu-qwen3-vl-seen"])
def test_prompts_with_images_in_the_interpreter(name, monkeypatch):
    """The first decodes with the rotation within attention, as it has no norms of heads."""
    from interpreted_engine import InterpretedDevice, emulate_gpu

    emulate_gpu(monkeypatch)
    monkeypatch.setattr(MediaEngine, "_make_device", lambda self, ctx: InterpretedDevice(ctx))
    parts = [TEXT, image_of(2, 3), [9, 8, 7]]
    engine = MediaEngine(tiny_wrappers.wrapped(name), budget=24, max_model_len=64, num_blocks=16, max_num_seqs=3)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = engine.generate([prompt(*parts), prompt(TEXT[1:5])], params)
    assert found == [reference(name, parts, 5), reference(name, [TEXT[1:5]], 5)]
