"""On a GPU: LoRA adapters give the tokens of merged weights, eagerly and by graphs, and a step without any is as before."""

import pytest
import torch
from inline_engine import InlineEngine
from peft_folders import LINEAR, merge, write_adapter
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from quire.ipc.adapters import AdapterLimits
from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ROUNDING = 1e-4  # of logits of about 4: what lies so near the maximum is equal
NEAR = 0.05  # of the row's logit range, in 16 bits
RANKS = (1, 8, 24, 64)
LIMITS = AdapterLimits(max_loras=4, max_rank=64, has_head=True, has_embedding=True, captures=True)
WITH_EXPERTS = AdapterLimits(max_loras=4, max_rank=64, has_routers=True, has_experts=True)


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in (1, 5, 17, 33, 64, 97)]


def below_the_maximum(folder, some, got):
    """How far a token lies below the maximum of transformers' fp32 logits with merged weights: absolutely, and of the range."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = torch.zeros(2)
    for prompt, out in zip(some, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *out[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        below, span = logits.max(-1).values - chosen, logits.max(-1).values - logits.min(-1).values
        worst = torch.maximum(worst, torch.stack([below.max(), (below / span).max()]))
    return worst.tolist()


def adapters_of(model, root, targets=LINEAR, std=0.1):
    return [write_adapter(root / str(rank), model, targets, rank=rank, seed=rank, std=std) for rank in RANKS]


def engine_with(model, folders, limits=LIMITS, **options):
    engine = InlineEngine(model, device="cuda", adapters=limits, enable_prefix_caching=False, **options)
    for slot, folder in enumerate(folders):
        engine.load_adapter(folder, slot)
    return engine


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen3", "gpu-qwen2-mixed", "gpu-mistral-sliding", "gpu-llama-mha"])
def test_fp32_tokens_are_those_of_merged_weights(name, graphs, tmp_path):
    model = tiny_model(name)
    folders = adapters_of(model, tmp_path)
    engine = engine_with(model, folders, graphs=graphs)
    some = prompts()
    slots = [-1, *range(len(folders))]
    got = engine.generate(some * 5, GREEDY, [slot for slot in slots for _ in some])
    for i, slot in enumerate(slots):
        merged = model if slot < 0 else merge(model, folders[slot], tmp_path / f"m{slot}")
        outputs = got[i * len(some) : (i + 1) * len(some)]
        assert below_the_maximum(merged, some, outputs)[0] < ROUNDING * 10, f"slot {slot}"
        if slot >= 0:
            alone = engine.generate(some[3:4], GREEDY, [slot])
            assert below_the_maximum(merged, some[3:4], alone)[0] < ROUNDING * 10


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["gpu-qwen3-moe", "gpu-deepseek-v3"])
def test_experts_and_routers(name, graphs, tmp_path):
    model = tiny_model(name)
    more = ("gate", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    folders = adapters_of(model, tmp_path, (*LINEAR, *more))
    engine = engine_with(model, folders, WITH_EXPERTS, graphs=graphs)
    few = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    some = prompts()[1:4]
    got = engine.generate(some * 4, few, [slot for slot in range(4) for _ in some])
    for slot, folder in enumerate(folders):
        merged = merge(model, folder, tmp_path / f"m{slot}")
        assert below_the_maximum(merged, some, got[slot * len(some) : (slot + 1) * len(some)])[0] < 1e-2, f"slot {slot}"


@pytest.mark.parametrize("name", ["gpu-llama", "gpu-qwen3"])
def test_the_head_and_the_embedding(name, tmp_path):
    model = tiny_model(name)
    folder = write_adapter(tmp_path / "a", model, (*LINEAR, "lm_head", "embed_tokens"), rank=8, std=0.1)
    engine = engine_with(model, [folder], graphs=True)
    got = engine.generate(prompts(), GREEDY, [0] * 6)
    assert below_the_maximum(merge(model, folder, tmp_path / "m"), prompts(), got)[0] < ROUNDING * 10


@pytest.mark.parametrize("name", ["wide-llama", "wide-qwen3"])
def test_16_bits(name, tmp_path):
    """Graphs give the tokens of eager steps where both have the same numbers of rows, and these are near the maximum."""
    model = tiny_model(name)
    folders = adapters_of(model, tmp_path, std=0.05)
    how = {"dtype": torch.bfloat16, "max_num_seqs": 8, "num_blocks": 64, "block_size": 64}
    eager, graphs = (engine_with(model, folders, graphs=graphs, **how) for graphs in (False, True))
    unpadded = torch.arange(4, 68).view(8, 8).tolist()
    slots = [-1, 0, 1, 2, 3, 0, 1, -1]
    got = graphs.generate(unpadded, GREEDY, slots)
    assert got == eager.generate(unpadded, GREEDY, slots)
    for slot in range(4):
        rows = [i for i, s in enumerate(slots) if s == slot]
        merged = merge(model, folders[slot], tmp_path / f"m{slot}")
        assert below_the_maximum(merged, [unpadded[i] for i in rows], [got[i] for i in rows])[1] < NEAR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_without_adapters_are_as_without_slots(dtype, tmp_path):
    model = tiny_model("gpu-llama")
    how = {"device": "cuda", "dtype": dtype, "graphs": True, "enable_prefix_caching": False}
    plain = InlineEngine(model, **how).generate(prompts(), GREEDY)
    engine = engine_with(model, adapters_of(model, tmp_path), dtype=dtype, graphs=True)
    assert engine.generate(prompts(), GREEDY) == plain
    engine.generate(prompts(), GREEDY, [0, 1, 2, 3, -1, 0])
    assert engine.generate(prompts(), GREEDY) == plain


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantized_weights_stay_as_they_are(quantization, tmp_path):
    """The adapter multiplies the 16-bit input: its answers differ from the base's, and graphs equal eager steps."""
    model = tiny_model("wide-llama")
    folders = adapters_of(model, tmp_path, std=0.05)
    how = {"dtype": torch.bfloat16, "max_num_seqs": 8, "model_options": {"quantization": quantization}}
    eager, graphs = (engine_with(model, folders, graphs=graphs, **how) for graphs in (False, True))
    unpadded = torch.arange(4, 68).view(8, 8).tolist()
    slots = [0, 1, 2, 3] * 2
    got = graphs.generate(unpadded, GREEDY, slots)
    assert got == eager.generate(unpadded, GREEDY, slots)
    base = graphs.generate(unpadded, GREEDY)
    assert sum(a != b for a, b in zip(got, base, strict=True)) >= 6
    assert base == InlineEngine(model, device="cuda", graphs=True, enable_prefix_caching=False, **how).generate(
        unpadded, GREEDY
    )


def test_a_load_does_not_disturb_steps(tmp_path):
    """A slot is filled on a stream of its own while another slot's adapter is in use."""
    model = tiny_model("gpu-llama")
    folders = adapters_of(model, tmp_path)
    engine = engine_with(model, folders[:1], graphs=True)
    want = engine.generate(prompts(), GREEDY, [0] * 6)
    for folder in folders[1:]:
        engine.load_adapter(folder, 1)
        assert engine.generate(prompts(), GREEDY, [0] * 6) == want
