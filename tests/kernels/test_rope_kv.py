"""QK-norm, RoPE and KV write: the CPU path against transformers, the kernel against the CPU path, caches beyond 2^31."""

import pytest
import torch

from quire.kernels.attention import rope_kv_reference

# tokens, q heads, kv heads, head size, rotary size, block size
SHAPES = [(1, 1, 1, 2, 2, 1), (5, 3, 2, 24, 24, 4), (3, 4, 4, 20, 8, 5), (2, 16, 8, 128, 128, 16), (9, 8, 1, 64, 32, 16)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def table(positions, rotary, base=10000.0):
    frequencies = 1.0 / base ** (torch.arange(0, rotary, 2).float() / rotary)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def case(shape, dtype, device, cache_dtype=None, norm=True, scales=False):
    tokens, hq, hkv, d, rotary, block_size = shape
    g = torch.Generator().manual_seed(sum(shape))
    width = (hq + 2 * hkv) * d
    qkv = torch.randn(tokens, width + 3, generator=g).to(device, dtype)[:, :width]
    slots = torch.randperm(7 * block_size, generator=g)[:tokens].clone()
    slots[tokens // 2] = -1 if tokens > 1 else slots[0]
    weights = [torch.randn(d, generator=g).to(device, dtype) if norm else None for _ in range(2)]
    cache = [torch.zeros(7, 2, hkv, block_size, d, device=device, dtype=cache_dtype or dtype)[:, 0] for _ in range(2)]
    return {
        "qkv": qkv,
        "positions": torch.randint(0, 50, (tokens,), generator=g, dtype=torch.int32).to(device),
        "cos_sin": table(50, rotary).to(device),
        "slot_mapping": slots.to(device),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "num_q_heads": hq,
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-6,
        "k_scale": torch.tensor([0.5], device=device) if scales else None,
        "v_scale": torch.tensor([2.0], device=device) if scales else None,
    }


def test_the_cpu_path_is_qwen3s_to_the_bit():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    shape = (6, 4, 2, 16, 16, 4)
    args = case(shape, torch.float32, "cpu")
    qkv = args["qkv"].clone()
    rope_kv_reference.rope_kv(**args)
    heads = qkv.view(6, 8, 16)
    norms = [Qwen3RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)]
    for module, weight in zip(norms, (args["q_weight"], args["k_weight"]), strict=True):
        module.weight.data.copy_(weight)
    q, k = norms[0](heads[:, :4]).transpose(0, 1)[None], norms[1](heads[:, 4:6]).transpose(0, 1)[None]
    halves = args["cos_sin"][args["positions"]].chunk(2, -1)
    cos, sin = (torch.cat([x, x], -1)[None] for x in halves)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(args["qkv"].view(6, 8, 16)[:, :4], q[0].transpose(0, 1))
    assert torch.equal(args["qkv"].view(6, 8, 16)[:, 4:], heads[:, 4:])  # k and v stay as they were
    for token, slot in enumerate(args["slot_mapping"].tolist()):
        if slot >= 0:
            assert torch.equal(args["k_cache"][slot // 4, :, slot % 4], k[0, :, token])
            assert torch.equal(args["v_cache"][slot // 4, :, slot % 4], heads[token, 6:])
    assert int((args["v_cache"] != 0).any(-1).any(1).sum()) == 5  # nothing else was written


def compare(shape, dtype, device, interleaved=False, weighs="rounded", q_scales=None, **kwargs):
    from quire.kernels.attention import rope_kv

    given = {"interleaved": interleaved, "weighs": weighs, "q_scales": None if q_scales is None else q_scales.to(device)}
    ours, theirs = case(shape, dtype, device, **kwargs), case(shape, dtype, device, **kwargs)
    rope_kv.rope_kv(**ours, **given)
    rope_kv_reference.rope_kv(**theirs, **given)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(ours["qkv"], theirs["qkv"], **tolerance)
    for name in ("k_cache", "v_cache"):
        if ours[name].dtype.itemsize == 1:  # a value on the edge may round to the neighbour: 1/8 or 1/4 apart
            tolerance = {"rtol": 0.13 if ours[name].dtype == torch.float8_e4m3fn else 0.26, "atol": 0.02}
        torch.testing.assert_close(ours[name].float(), theirs[name].float(), **tolerance)
        assert ours[name].float().abs().sum() > 0


@pytest.mark.interpret
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_in_the_interpreter(shape, norm):
    compare(shape, torch.float32, "cpu", norm=norm, scales=norm)


@pytest.mark.parametrize("shape", [(6, 4, 2, 16, 16, 4), (6, 4, 2, 16, 8, 4)])
def test_interleaved_pairs_are_gpt_js_to_the_bit(shape):
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    args, rotary = case(shape, torch.float32, "cpu", norm=False), shape[4]
    q = args["qkv"].clone().view(6, 8, 16)[:, :4]
    rope_kv_reference.rope_kv(**args, interleaved=True)
    cos, sin = args["cos_sin"][args["positions"]].chunk(2, -1)
    want = apply_rotary_pos_emb(q[None, ..., :rotary], sin[None], cos[None])[0]
    assert torch.equal(args["qkv"].view(6, 8, 16)[:, :4], torch.cat((want, q[..., rotary:]), -1))


Q_SCALES = torch.linspace(0.5, 2.0, 50)  # of the table's positions
OTHERS = [
    {"interleaved": True},
    {"weighs": "wide"},
    {"weighs": "plus_one", "interleaved": True},
    {"q_scales": Q_SCALES},
]
NOTHING_ROTATED = (3, 4, 2, 20, 0, 4)


@pytest.mark.interpret
@pytest.mark.parametrize("how", OTHERS, ids=lambda how: "-".join(how))
@pytest.mark.parametrize("shape", [*SHAPES[1:3], NOTHING_ROTATED])
def test_other_rotations_and_norms_in_the_interpreter(shape, how):
    compare(shape, torch.float32, "cpu", **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("how", OTHERS, ids=lambda how: "-".join(how))
@pytest.mark.parametrize("shape", [*SHAPES[1:], NOTHING_ROTATED])
def test_other_rotations_and_norms(shape, how, dtype):
    compare((*shape[:5], max(shape[5], shape[0])), dtype, "cuda", **how)


@pytest.mark.parametrize("how", [{}, *OTHERS], ids=lambda how: "-".join(how))
@pytest.mark.parametrize("shape", [*SHAPES[1:], NOTHING_ROTATED])
def test_the_quick_cpu_path_is_the_reference(shape, how):
    from quire.kernels.attention import rope_kv_cpu
    from quire.kernels.attention.kv_entries_cpu import as_entries, entry_strides, token_entries

    ours, theirs = case(shape, torch.float32, "cpu"), case(shape, torch.float32, "cpu")
    rope_kv_reference.rope_kv(**theirs, **how)
    k, v, mapping, heads = ours["k_cache"], ours["v_cache"], ours["slot_mapping"].numpy(), ours["num_q_heads"]
    tokens = (mapping >= 0).nonzero()[0]
    entries = token_entries(mapping[tokens], entry_strides(k), k.shape[2], k.shape[1])
    at = rope_kv_cpu.rotations(ours["cos_sin"], ours["positions"].numpy(), how.get("interleaved", False))
    weights = rope_kv_cpu.head_weights(ours["q_weight"], ours["k_weight"], heads, k.shape[1])
    writes, eps = rope_kv_cpu.Writes(entries, tokens), ours["eps"]
    caches = as_entries(k), as_entries(v)
    qkv = ours["qkv"].contiguous()
    q_scales = how["q_scales"].numpy()[ours["positions"].numpy()] if "q_scales" in how else None
    weighs = how.get("weighs", "rounded")
    q = rope_kv_cpu.rope_kv(qkv, at, writes, *caches, heads, weights, eps, weighs=weighs, q_scales=q_scales)
    want = theirs["qkv"].unflatten(1, (-1, shape[3]))[:, :heads]
    for got, expected in ((q, want), (k, theirs["k_cache"]), (v, theirs["v_cache"])):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def compare_queries_alone(shape, dtype, device):
    """Of a layer that reads the keys and values of another: as they are with keys beside them, and nothing is written."""
    from quire.kernels.attention import rope_kv

    whole, alone = (case(shape, dtype, device, scales=False) for _ in range(2))
    width = whole["num_q_heads"] * shape[3]
    alone["qkv"], before = alone["qkv"][:, :width].clone(), alone["k_cache"].clone()
    rope_kv.rope_kv(**whole)
    rope_kv.rope_kv(**alone)
    # another tile of heads may add a norm's squares in another order
    torch.testing.assert_close(alone["qkv"], whole["qkv"][:, :width], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(alone["k_cache"], before)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_queries_alone_in_the_interpreter(shape):
    compare_queries_alone(shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 8, 1, 512, 512, 64)])
def test_queries_alone(shape, dtype):
    compare_queries_alone((*shape[:5], max(shape[5], shape[0])), dtype, "cuda")


@pytest.mark.interpret
def test_the_tile_of_heads_changes_nothing():
    from quire.kernels.attention import rope_kv

    results = [case((3, 5, 2, 16, 16, 4), torch.float32, "cpu", norm=True) for _ in range(3)]
    for args, tile in zip(results, (16, 64, 2048), strict=True):
        rope_kv.rope_kv(**args, tile=tile)
    for args in results[1:]:
        assert all(torch.equal(args[name], results[0][name]) for name in ("qkv", "k_cache", "v_cache"))


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.attention import rope_kv

    def refused(error, **changes):
        with pytest.raises(error):
            rope_kv.rope_kv(**{**case((2, 2, 1, 8, 8, 4), torch.float32, "cpu"), **changes})

    refused(ValueError, num_q_heads=3)
    refused(ValueError, q_weight=None)
    refused(ValueError, positions=torch.zeros(3, dtype=torch.int32))
    refused(ValueError, k_scale=torch.ones(1))
    refused(TypeError, positions=torch.zeros(2, dtype=torch.int64))
    refused(TypeError, k_cache=torch.zeros(7, 1, 4, 8, dtype=torch.int8), v_cache=torch.zeros(7, 1, 4, 8, dtype=torch.int8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 32, 8, 128, 128, 16), (33, 14, 2, 80, 80, 64)])
def test_kernel(shape, dtype, norm):
    shape = (*shape[:5], max(shape[5], shape[0]))  # room for the tokens
    compare(shape, dtype, "cuda", norm=norm, scales=norm)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_kernel_writes_8_bit_caches(cache_dtype):
    compare((9, 8, 2, 128, 128, 16), torch.bfloat16, "cuda", cache_dtype=cache_dtype, scales=True)


@pytest.mark.gpu
def test_kernel_reaches_beyond_2_31_elements():
    from quire.kernels.attention import rope_kv

    num_blocks = 2**31 // (8 * 16 * 128) + 10
    cache = torch.zeros(2, num_blocks, 8, 16, 128, device="cuda", dtype=torch.float16)
    args = case((4, 8, 8, 128, 128, 16), torch.float16, "cuda")
    slots = torch.tensor([num_blocks * 16 - 1, 3, -1, (num_blocks - 2) * 16], device="cuda")
    qkv = args["qkv"].clone()
    rope_kv.rope_kv(**{**args, "k_cache": cache[0], "v_cache": cache[1], "slot_mapping": slots})
    v = qkv.view(4, 24, 128)[:, 16:]
    assert torch.equal(cache[1, -1, :, 15], v[0])
    assert torch.equal(cache[1, 0, :, 3], v[1])
    assert torch.equal(cache[1, -2, :, 0], v[3])
    assert int(cache[1].any(-1).any(1).sum()) == 3
