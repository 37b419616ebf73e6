"""LoRA adapters of experts, routers, heads and tables; over ranks and stages; with drafts and prompt logprobs."""

import json

import pytest
import torch
from inline_engine import InlineEngine
from peft_folders import LINEAR, merge, shapes_of, write_adapter, write_folder
from thread_ranks import on_every_rank
from thread_stages import engine_of_stages
from tiny_models import tiny_model

from quire.ipc.adapters import AdapterError, AdapterLimits
from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.adapters.places import slots_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(20, 20 + n)) for n in (3, 17, 40)]
ALL = AdapterLimits(max_loras=3, max_rank=16, has_head=True, has_embedding=True, has_routers=True, has_experts=True)
MIXTRAL = ("q_proj", "v_proj", "w1", "w2", "w3", "gate")
TABLES = (*LINEAR, "lm_head", "embed_tokens")


def engine_of(model, **options):
    return InlineEngine(model, adapters=ALL, enable_prefix_caching=False, **options)


def adapted(model, tmp_path, targets, **how):
    """(an adapter, what the model with it merged answers)"""
    folder = write_adapter(tmp_path / "a", model, targets, std=0.1, **how)
    return folder, InlineEngine(merge(model, folder, tmp_path / "merged")).generate(PROMPTS, GREEDY)


CASES = {
    "llama": TABLES,
    "qwen2-moe": (*LINEAR, "gate", "shared_expert_gate"),
    "mixtral": MIXTRAL,
}


@pytest.mark.parametrize("name", CASES)
def test_every_layer(name, tmp_path):
    model = tiny_model(name)
    folder, want = adapted(model, tmp_path, CASES[name], rank=8)
    engine = engine_of(model)
    engine.load_adapter(folder, 1)
    base = InlineEngine(model).generate(PROMPTS, GREEDY)
    assert engine.generate(PROMPTS * 2, GREEDY, [1, 1, 1, -1, -1, -1]) == want + base
    assert want != base


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "llama"])
def test_two_ranks(name, expert_parallel, tmp_path):
    model = tiny_model(name)
    folder, want = adapted(model, tmp_path, CASES[name], rank=4)

    def run(parallel):
        engine = engine_of(model, parallel=parallel)
        engine.load_adapter(folder, 2)
        return engine.generate(PROMPTS, GREEDY, [2] * 3)

    options = {"expert_parallel": True} if expert_parallel and name != "llama" else {}
    results, _ = on_every_rank(2, run, **options)
    assert results == [want, want]


def test_a_tied_head_and_its_table_have_adapters_of_their_own(tmp_path):
    model = tiny_model("llama-tied")
    folder = write_adapter(tmp_path / "a", model, ("embed_tokens",), rank=4, std=0.1)
    merged = merge(model, folder, tmp_path / "merged")
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    from safetensors.torch import load_file, save_file

    file = merged / "model.safetensors"
    head = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    save_file(load_file(file) | {"lm_head.weight": head}, file, {"format": "pt"})
    engine = engine_of(model)
    engine.load_adapter(folder, 0)
    assert engine.generate(PROMPTS, GREEDY, [0] * 3) == InlineEngine(merged).generate(PROMPTS, GREEDY)


def stacked(model, tmp_path, version, is_swapped, rank=4):
    """An adapter of the parameters of all experts, as PEFT writes it; and the same as layers of each expert."""
    shapes = shapes_of(model)
    generator = torch.Generator().manual_seed(5)
    parameters, layers = {}, {}
    for i in range(3):
        module = f"base_model.model.model.layers.{i}.mlp.experts"
        own = f"base_model.model.model.layers.{i}.mlp.experts"
        if f"model.layers.{i}.mlp.experts.0.up_proj.weight" not in shapes:
            continue
        inner, hidden = shapes[f"model.layers.{i}.mlp.experts.0.up_proj.weight"]
        for name, out, size in ((f"{module}.base_layer", 2 * inner, hidden), (module, hidden, inner)):
            a = torch.randn(8, rank, size, generator=generator) * 0.15
            b = torch.randn(8, out, rank, generator=generator) * 0.15
            for e in range(8):
                kinds = (
                    {"down_proj": b[e]} if out == hidden else dict(zip(("gate_proj", "up_proj"), b[e].chunk(2), strict=True))
                )
                for kind, part in kinds.items():
                    layers |= {f"{own}.{e}.{kind}.lora_A.weight": a[e], f"{own}.{e}.{kind}.lora_B.weight": part}
            if is_swapped:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            parameters[f"{name}.lora_A.weight"] = a.flatten(0, 1)
            parameters[f"{name}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    write_folder(tmp_path / "each", layers)
    return write_folder(tmp_path / "all", parameters, peft_version=version), tmp_path / "each"


@pytest.mark.parametrize("is_swapped", [False, True])
def test_parameters_of_all_experts(is_swapped, tmp_path):
    model = tiny_model("qwen3-moe")
    folders = stacked(model, tmp_path, "0.18.1" if is_swapped else "0.21.2", is_swapped)
    engine = engine_of(model)
    for slot, folder in enumerate(folders):
        engine.load_adapter(folder, slot)
    outputs = [engine.generate(PROMPTS, GREEDY, [slot] * 3) for slot in (0, 1, -1)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_layers_that_slots_do_not_hold_are_named(tmp_path):
    model = tiny_model("mixtral")
    engine = InlineEngine(model, adapters=AdapterLimits())
    for targets in (("w1",), ("gate",), ("lm_head",), ("embed_tokens",)):
        with pytest.raises(AdapterError, match=f"{targets[0]}.*slots do not hold"):
            engine.load_adapter(write_adapter(tmp_path / targets[0], model, targets), 0)
    folder = write_folder(tmp_path / "kv", {
        f"base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{half}.weight": torch.ones(4, 4) for half in "AB"
    })  # fmt: skip
    with pytest.raises(AdapterError, match="leave it out of target_modules"):
        engine.load_adapter(folder, 0)


def test_broken_parameters_of_experts_are_refused_before_they_are_read(tmp_path):
    engine = engine_of(tiny_model("qwen3-moe"))
    inner, hidden = engine.model.model.layers[0].mlp.experts.place.inner.full, 64
    layer = "base_model.model.model.layers.0.mlp.experts"
    for a, b, what in (
        ((8 * 4, inner), (hidden + 1, 8 * 4), "no parameter of the experts"),
        ((7 * 4, inner), (hidden, 7 * 4), "not a rank for each of 8 experts"),
        ((8 * 20, inner), (hidden, 8 * 20), "beyond --max-lora-rank"),
    ):
        tensors = {f"{layer}.lora_A.weight": torch.ones(a), f"{layer}.lora_B.weight": torch.ones(b)}
        with pytest.raises(AdapterError, match=what):
            engine.load_adapter(write_folder(tmp_path / what, tensors), 0)
    twice = {
        f"base_model.model.model.layers.0.{module}.gate.lora_{half}.weight": torch.ones(size)
        for module in ("mlp", "block_sparse_moe")
        for half, size in (("A", (4, 64)), ("B", (8, 4)))
    }
    with pytest.raises(AdapterError, match="under two names"):
        engine_of(tiny_model("mixtral")).load_adapter(write_folder(tmp_path / "twice", twice), 0)


def test_target_modules_name_layers_of_every_kind(tmp_path):
    model = tiny_model("mixtral")
    engine = InlineEngine(
        model, adapters=AdapterLimits(target_modules=("lm_head", "embed_tokens", "gate", "experts", "v_proj"))
    )
    engine.load_adapter(write_adapter(tmp_path / "a", model, ("lm_head", "embed_tokens", "gate", "w1", "v_proj")), 0)
    with pytest.raises(AdapterError, match=r"o_proj.*--lora-target-modules"):
        engine.load_adapter(write_adapter(tmp_path / "b", model, ("o_proj",)), 0)


def test_two_stages(tmp_path):
    model = tiny_model("llama")
    folder, want = adapted(model, tmp_path, TABLES)
    engine = engine_of_stages(model, 2, adapters=ALL, enable_prefix_caching=False)
    for stage in engine.engines:
        stage.load_adapter(folder, 1)
    assert engine.generate(PROMPTS, GREEDY, [1] * 3) == want


def test_drafts_are_the_bases_and_tokens_the_adapters(tmp_path):
    model = tiny_model("llama")
    folder, want = adapted(model, tmp_path, TABLES)
    engine = engine_of(model, speculation=SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    engine.load_adapter(folder, 1)
    base = InlineEngine(model).generate(PROMPTS, GREEDY)
    assert engine.generate(PROMPTS * 2, GREEDY, [1, 1, 1, -1, -1, -1]) == want + base


def test_prompt_logprobs_are_the_adapters(tmp_path):
    model = tiny_model("llama")
    folder, _ = adapted(model, tmp_path, TABLES)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    engine, merged, base = engine_of(model, budget=24), InlineEngine(tmp_path / "merged"), InlineEngine(model)
    engine.load_adapter(folder, 1)
    found = {}
    for name, one, adapters in (("adapter", engine, [1, -1, 1]), ("merged", merged, None), ("base", base, None)):
        one.generate(PROMPTS, params, adapters)
        found[name] = sorted(float(x) for row in one.prompt_rows for x in row.logprobs)
    rows = {"merged": (0, 2), "base": (1,)}
    want = []
    for name, which in rows.items():
        for i in which:
            one = InlineEngine(tmp_path / "merged" if name == "merged" else model)
            one.generate([PROMPTS[i]], params)
            want += [float(x) for row in one.prompt_rows for x in row.logprobs]
    torch.testing.assert_close(torch.tensor(found["adapter"]), torch.tensor(sorted(want)), rtol=1e-4, atol=1e-4)
    assert found["merged"] != found["base"]


def test_slots_take_the_bytes_that_are_planned():
    model = engine_of(tiny_model("mixtral")).model
    planned = slots_bytes(model, ALL, torch.float32)
    engine = engine_of(tiny_model("mixtral"))
    assert planned == engine.adapters.slot_bytes * ALL.max_loras == sum(w.num_bytes for w in engine.adapters.places.layers)
