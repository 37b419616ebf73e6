"""A stage's part of a model: which layers, which tensors of a checkpoint, which part of the KV cache."""

import shutil

import msgspec
import pytest
import torch
from inline_engine import InlineEngine
from quantized_models import quantized
from safetensors.torch import load_file, save_file
from thread_ranks import engine_of_ranks
from thread_stages import engine_of_stages
from tiny_models import tiny_model

from quire.ipc.messages.stats import ExpertTokens
from quire.ipc.sampling import SamplingParams
from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel, Stage
from quire.workers.stages import module_bytes, stage_of, stored_bytes


def part(folder, index, count):
    config = read_model_config(folder)
    stage = stage_of(config, torch.float32, index, count)
    return build_model(config, torch.float32, Parallel(stage=stage)), stage


def test_one_piece_is_no_stage():
    config = read_model_config(tiny_model("llama"))
    assert stage_of(config, torch.float32, 0, 1) == Stage() and Stage().is_first and Stage().is_last


def test_more_stages_than_layers_are_refused():
    config = read_model_config(tiny_model("llama"))
    with pytest.raises(ModelConfigError, match="--pipeline-parallel-size 4: the model has 3 layers, and each stage needs one"):
        stage_of(config, torch.float32, 0, 4)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "bloom", "gpt-oss-plain"])
def test_bytes_are_those_of_the_parameters(name):
    config = read_model_config(tiny_model(name))
    whole = build_model(config, torch.float32, Parallel())
    first, layers, last = module_bytes(config, torch.float32)
    table = whole.model.embed_tokens.weight.nbytes if config.tie_word_embeddings else 0
    assert first + sum(layers) + last - table == sum(p.nbytes for p in whole.parameters())
    assert layers == [sum(p.nbytes for p in layer.parameters()) for layer in whole.model.layers]


def test_tensors_of_other_stages_are_not_read(tmp_path):
    """They need not even be there."""
    folder = tiny_model("llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    model, stage = part(folder, 1, 2)
    kept = {n: t for n, t in tensors.items() if n.startswith(tuple(f"model.layers.{i}." for i in stage.layers))}
    save_file(kept | {n: tensors[n] for n in ("model.norm.weight", "lm_head.weight")}, tmp_path / "model.safetensors")
    read = load_weights(model, tmp_path, "cpu", progress=False)
    assert read == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    first, _ = part(folder, 0, 2)
    with pytest.raises(WeightsError, match=r"missing: model\.embed_tokens\.weight, model\.layers\.0"):
        load_weights(first, tmp_path, "cpu", progress=False)


def test_what_no_stage_knows_is_surplus_to_all(tmp_path):
    folder = tiny_model("llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    for index in range(2):
        with pytest.raises(WeightsError, match=r"surplus: model.layers.3.mlp.up_proj.weight \(unknown to the model\)$"):
            load_weights(part(folder, index, 2)[0], tmp_path, "cpu", progress=False)


def test_a_tied_table_may_be_stored_as_the_head_alone(tmp_path):
    folder = tiny_model("qwen3-tied")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": table}, tmp_path / "model.safetensors")
    for index in range(3):
        model, _ = part(folder, index, 3)
        load_weights(model, tmp_path, "cpu", progress=False)
        if index != 1:
            assert torch.equal(model.model.embed_tokens.weight, table)


def test_groups_are_the_models_and_tensors_the_stages():
    config = read_model_config(tiny_model("gemma3"))
    specs = config.attention_specs(Parallel())
    whole = KVCache(specs, 16, torch.float32)
    parts = [KVCache(specs, 16, torch.float32, layers=range(i, i + 1)) for i in range(len(specs))]
    assert all(cache.groups == whole.groups and cache.kinds == whole.kinds for cache in parts)
    for i, cache in enumerate(parts):
        cache.allocate(3, torch.device("cpu"))
        assert len(cache.k) == 1 and cache.places[i].group == whole.places[i].group
        assert cache.block_bytes < whole.block_bytes


@pytest.mark.parametrize("form", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_a_quantized_model_is_cut_by_the_bytes_that_are_stored(form, tmp_path):
    """Its embedding is not quantized, so it weighs more; tokens are those of one piece."""
    folder = tmp_path / "model"
    quantized("llama", form, folder)
    config = read_model_config(folder)
    stored = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    first, layers, last = stored_bytes(config, folder)
    assert first + sum(layers) + last == stored and layers[0] < module_bytes(config, torch.float32)[1][0]
    asked = [list(range(5, 25)), [7, 8, 9]]
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=12, ignore_eos=True)
    assert engine_of_stages(folder, 2).generate(asked, params) == InlineEngine(folder).generate(asked, params)


def counted(engine):
    """By rank: what it has counted of experts' tokens, None where another counts for it."""
    loads = [runner.ctx.parallel.expert_load for runner in engine.runner.runners]
    return [load and msgspec.msgpack.decode(load.take(), type=ExpertTokens) for load in loads]


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("qwen3-moe-mixed", marks=pytest.mark.slow)])
def test_the_first_rank_of_each_stage_counts_the_tokens_of_its_layers_experts(name):
    """Together, as many as the first of two ranks that have all layers."""
    folder, asked = tiny_model(name), [list(range(5, 25)), [7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    together, staged = engine_of_ranks(folder, 2, expert_parallel=True), engine_of_stages(folder, 2, 2, expert_parallel=True)
    assert staged.generate(asked, params) == together.generate(asked, params)
    [whole, _], [first, second, last, fourth] = counted(together), counted(staged)
    assert second is None and fourth is None and min(first.by_rank + last.by_rank) > 0
    assert [a + b for a, b in zip(first.by_rank, last.by_rank, strict=True)] == whole.by_rank
    assert first.busiest + last.busiest == whole.busiest
