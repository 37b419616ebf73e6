"""LoRA adapters in a model's layers: tokens equal those of a checkpoint with the adapter merged, alone and in a batch."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from inline_engine import InlineEngine
from peft_folders import ATTENTION, LINEAR, merge, shapes_of, write_adapter, write_folder
from thread_ranks import on_every_rank
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from quire.ipc.adapters import AdapterError, AdapterLimits
from quire.ipc.sampling import SamplingParams
from quire.workers.adapters.peft import read_adapter

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = [list(range(20, 20 + n)) for n in (3, 17, 40)]
LIMITS = AdapterLimits(max_loras=4, max_rank=64)


@functools.cache
def root() -> Path:
    return Path(tempfile.mkdtemp(prefix="adapters-"))


def greedy_of_transformers(folder, prompts):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def engine_of(model, limits=LIMITS, **options):
    return InlineEngine(model, adapters=limits, enable_prefix_caching=False, **options)


def test_tokens_equal_those_of_transformers_with_the_adapter_merged(tmp_path):
    model = tiny_model("llama")
    shared = {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"mlp.down_proj": 5}}
    folders = [
        write_adapter(tmp_path / "1", model, rank=1, seed=1),
        write_adapter(tmp_path / "8", model, ATTENTION, rank=8, seed=2, use_rslora=True),
        write_adapter(tmp_path / "24", model, rank=24, seed=3, ranks={"k_proj": 3}, alpha_pattern=shared["alpha_pattern"]),
        write_adapter(
            tmp_path / "64", model, ("q_proj", "up_proj"), rank=64, seed=4, only=r"layers\.[12]", dtype=torch.bfloat16
        ),
    ]
    engine = engine_of(model)
    for slot, folder in enumerate(folders):
        engine.load_adapter(folder, slot)
    base = InlineEngine(model).generate(PROMPTS, GREEDY)
    want = [greedy_of_transformers(merge(model, folder, tmp_path / f"m{folder.name}"), PROMPTS) for folder in folders]
    mixed = engine.generate(PROMPTS * 5, GREEDY, [slot for slot in (-1, 0, 1, 2, 3) for _ in PROMPTS])
    assert mixed == [tokens for outputs in (base, *want) for tokens in outputs]
    for slot, outputs in enumerate(want):
        assert all(a != b for a, b in zip(outputs, base, strict=True)), "the adapter changes nothing"
        assert engine.generate(PROMPTS, GREEDY, [slot] * 3) == outputs
    assert engine.generate(PROMPTS, GREEDY) == base


def test_an_adapter_may_begin_within_the_prompt(tmp_path):
    """Tokens before it are the base model's: their keys and values, and so what follows, differ from a whole adapter's."""
    model = tiny_model("llama")
    engine = engine_of(model, budget=8)  # a prompt is several chunks
    engine.load_adapter(write_adapter(tmp_path / "a", model), 0)
    prompt = PROMPTS[2]
    outputs = {}
    for begin in (0, 1, 20, 39, len(prompt), 1000):
        name = engine.add(prompt, GREEDY, 0, begin)
        outputs[begin] = engine.run()[name << 8]
    assert outputs[1000] == InlineEngine(model).generate([prompt], GREEDY)[0]
    assert len({tuple(tokens) for tokens in outputs.values()}) >= 5
    alone = dict(outputs)
    names = {begin: engine.add(prompt, GREEDY, 0, begin) for begin in outputs}
    together = engine.run()
    assert {begin: together[name << 8] for begin, name in names.items()} == alone


def test_a_slot_holds_what_was_loaded_last(tmp_path):
    model = tiny_model("llama")
    folders = [
        write_adapter(tmp_path / "a", model, seed=1, rank=8),
        write_adapter(tmp_path / "b", model, ("v_proj",), seed=2, rank=2),
    ]
    engine = engine_of(model, AdapterLimits(max_loras=1, max_cpu_loras=1))
    want = [
        InlineEngine(merge(model, folder, tmp_path / f"m{i}")).generate(PROMPTS, GREEDY) for i, folder in enumerate(folders)
    ]
    for i in (0, 1, 0, 1):
        engine.load_adapter(folders[i], 0)
        assert engine.generate(PROMPTS, GREEDY, [0] * 3) == want[i]
        assert len(engine.adapters.host_numbers) == 1


def test_host_copies_are_used_again_and_dropped_when_told(tmp_path):
    model = tiny_model("llama")
    folder = write_adapter(tmp_path / "a", model)
    slots = engine_of(model).adapters
    plan = read_adapter(folder, slots.limits)
    slots.load(7, 0, plan)
    (folder / "adapter_model.safetensors").unlink()
    slots.load(7, 1, plan)
    assert torch.equal(slots.places.layers[0].a[0], slots.places.layers[0].a[1])
    slots.forget(7)
    with pytest.raises(AdapterError, match="has no adapter_model"):
        slots.load(7, 0, plan)


def test_a_file_that_is_not_the_plans_any_more(tmp_path):
    model = tiny_model("llama")
    slots = engine_of(model).adapters
    plan = read_adapter(write_adapter(tmp_path / "a", model), slots.limits)
    write_adapter(tmp_path / "a", model, seed=9)
    with pytest.raises(AdapterError, match="has changed"):
        slots.load(1, 0, plan)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_numbers(tmp_path, value):
    model = tiny_model("llama")
    engine = engine_of(model)
    layer = "base_model.model.model.layers.1.mlp.up_proj"
    bad = torch.zeros(128, 4)
    bad[100, 3] = value
    folder = write_folder(tmp_path / "a", {f"{layer}.lora_A.weight": torch.ones(4, 64), f"{layer}.lora_B.weight": bad})
    with pytest.raises(AdapterError, match=r"up_proj\.lora_B\.weight has values"):
        engine.load_adapter(folder, 0)


@pytest.mark.parametrize(
    ("layer", "shape", "what"),
    [
        ("model.layers.0.self_attn.q_proj", (64, 63), r"q_proj\.lora_A\.weight has shape \[4, 63\]"),
        ("model.layers.0.self_attn.q_proj", (65, 64), r"q_proj\.lora_B\.weight has shape \[65, 4\]"),
        ("model.layers.3.self_attn.q_proj", (64, 64), "no layer"),
        ("model.layers.0.self_attn.qkv_proj", (128, 64), "no layer"),
        ("model.norm", (64, 64), "no layer"),
        ("model.layers.0.mlp.up_proj", (128, 64), "--lora-target-modules"),
        ("lm_head", (512, 64), "registered at the start"),
    ],
)
def test_layers_and_shapes_that_the_model_has_not(tmp_path, layer, shape, what):
    engine = engine_of(tiny_model("llama"), AdapterLimits(target_modules=ATTENTION))
    name = f"base_model.model.{layer}"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, shape[1]), f"{name}.lora_B.weight": torch.ones(shape[0], 4)}
    with pytest.raises(AdapterError, match=what):
        engine.load_adapter(write_folder(tmp_path / "a", tensors), 0)


FUSED = ("qkv_proj", "gate_up_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2", "o_proj",
         "out_proj", "fc_in", "fc_out", "down_proj", *LINEAR)  # fmt: skip


@pytest.mark.parametrize("name", ["phi3", "gpt-neox", "falcon-40b", "gemma2", "glm", "cohere", "gptj", "bloom"])
def test_families_of_other_shapes(tmp_path, name):
    """Fused and interleaved layers, other norms, blocks with parallel residuals."""
    model = tiny_model(name)
    folder = write_adapter(tmp_path / "a", model, FUSED, rank=8, std=0.1)
    assert len({layer.split(".")[-2] for layer in shapes_of(model)} & set(FUSED)) >= 4
    want = greedy_of_transformers(merge(model, folder, tmp_path / "m"), PROMPTS)
    engine = engine_of(model)
    engine.load_adapter(folder, 2)
    got = engine.generate(PROMPTS * 2, GREEDY, [2, 2, 2, -1, -1, -1])
    base = InlineEngine(model).generate(PROMPTS, GREEDY)
    assert got[:3] == want and got[3:] == base
    assert want != base


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt-neox"])
def test_two_ranks(tmp_path, name):
    model = tiny_model(name)
    folder = write_adapter(tmp_path / "a", model, FUSED, rank=8, std=0.1)
    want = InlineEngine(merge(model, folder, tmp_path / "m")).generate(PROMPTS, GREEDY)

    def run(parallel):
        engine = engine_of(model, parallel=parallel)
        engine.load_adapter(folder, 1)
        return engine.generate(PROMPTS, GREEDY, [1] * 3)

    results, _ = on_every_rank(2, run)
    assert results == [want, want]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "fp8_per_block"])
def test_an_adapter_multiplies_the_input_as_it_is_of_quantized_weights(tmp_path, quantization):
    """Whatever the weight's format rounds, the adapter's product is that of the unrounded input, and it is added last."""
    model = tiny_model("llama")
    engine = engine_of(model, model_options={"quantization": quantization})
    engine.load_adapter(write_adapter(tmp_path / "a", model, rank=8), 1)
    steps, layer = engine.adapters.steps, engine.model.model.layers[1].mlp.gate_up_proj
    x = torch.randn(5, 64)
    plain = layer(x)
    steps._num_tokens, steps._groups = 5, [[(1, torch.tensor([0, 3]))], [], []]
    steps.is_active = True
    weights = next(w for w in engine.adapters.places.layers if w is layer.outer._adapted._adapter.weights)
    added = layer(x) - plain
    want = torch.zeros_like(plain)
    for piece, (first, end) in enumerate(weights.pieces):
        delta = x @ weights.a_of(1, piece, 8).T @ weights.b_of(1, piece, 8).T * weights.scales[1, piece]
        want[[0, 3], first:end] = delta[[0, 3]]
    torch.testing.assert_close(added, want, rtol=1e-4, atol=1e-4)
    assert (want[[0, 3]] != 0).all()
