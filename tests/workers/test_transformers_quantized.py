"""Quantized models that run by transformers' own code: what is quantized there, what stays floats, and what is refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from inline_engine import InlineEngine
from quantized_models import FORMATS
from quantized_packers import nf4, packed
from safetensors.torch import load_file, save_file
from transformers_tiny import MODEL_OPTIONS, NEW_TOKENS, prompts, tiny_config
from transformers_tiny import tiny_model as tiny_random

from quire.ipc.sampling import SamplingParams
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.models.transformers.rotary import _candidates
from quire.workers.parallel import Parallel

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def of_experts(tmp_path, pack, config):
    """tiny "qwen3-moe", whose experts alone are quantized."""
    shutil.copytree(tiny_models.tiny_model("qwen3-moe"), folder := tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for layer in [name.removesuffix(".weight") for name in tensors if ".experts." in name]:
        found, _ = pack(tensors.pop(f"{layer}.weight"), layer)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return folder


@pytest.mark.parametrize(("pack", "form"), [(packed, "pack-quantized"), (nf4, "nf4")])
def test_quantized_experts_are_refused_by_name(pack, form, tmp_path):
    folder = of_experts(tmp_path, pack, FORMATS[form][0])
    assert len(InlineEngine(folder).generate(prompts(), GREEDY)) == len(prompts())  # our own file reads them
    with pytest.raises(WeightsError, match=r"quantization_config: model\.layers\.0\.mlp\.experts\.0\.down_proj is quantized"):
        InlineEngine(folder, model_options=MODEL_OPTIONS)


def test_experts_that_would_stay_floats_without_a_word_are_refused():
    config = read_model_config(tiny_models.tiny_model("qwen3-moe"), quantization="int4", **MODEL_OPTIONS)
    with pytest.raises(ModelConfigError, match=r"--quantization int4: model\.layers\.0\.mlp\.experts .* leave the flag out"):
        build_model(config, torch.float32, Parallel())


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_another_name_stays_as_it_is(tied, tmp_path):
    """BioGPT's output_projection: --quantization leaves it, and the rules of a checkpoint seldom name it where it is tied."""
    config = tiny_config("biogpt")
    config.tie_word_embeddings = tied
    tiny_random(config).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, quantization="int8_per_channel_weight_only", **MODEL_OPTIONS)
    model = build_model(config, torch.float16, Parallel())  # which is not packed
    load_weights(model, tmp_path, "cpu")
    stored, weights = load_file(tmp_path / "model.safetensors"), list(model.parameters())

    def is_kept(name):
        return any(torch.equal(weight, stored[name].half()) for weight in weights if weight.shape == stored[name].shape)

    assert is_kept("biogpt.embed_tokens.weight" if tied else "output_projection.weight")
    assert not is_kept("biogpt.layers.0.fc1.weight")


@pytest.mark.parametrize("model_options", [{}, MODEL_OPTIONS])
@pytest.mark.parametrize("form", ["pack-quantized", "nf4"])
def test_a_tied_head_that_no_rule_names_is_none_of_the_quantized_layers(form, model_options, tmp_path):
    shutil.copytree(tiny_models.tiny_model("llama-tied"), folder := tmp_path / "model")
    config = FORMATS[form][0] | ({"ignore": []} if form == "pack-quantized" else {"llm_int8_skip_modules": ["visual"]})
    tensors = load_file(folder / "model.safetensors")
    for layer in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        found, _ = FORMATS[form][1](tensors.pop(f"{layer}.weight"), layer)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    assert len(InlineEngine(folder, model_options=model_options).generate(prompts(), GREEDY)) == len(prompts())


def test_a_scaling_without_a_factor_may_lack_the_positions_too():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    for positions, factors in (({}, {1.0}), ({"max_position_embeddings": 256}, {4.0})):
        module = SimpleNamespace(config=SimpleNamespace(rope_parameters=yarn, **positions))
        assert {rope.factor for rope in _candidates(module, 16, 16)} == factors
