"""Models that run by transformers' own code: tokens equal transformers', or the model is refused by its reason."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from inline_engine import InlineEngine
from quantized_models import FORMATS, quantized
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from torch import nn
from transformers_tiny import MODEL_OPTIONS, NEW_TOKENS, TYPES, greedy, outcome, prompts, tiny_config
from transformers_tiny import tiny_model as tiny_random

from quire.frontend.client.engine_options import engine_options
from quire.ipc.config import add_engine_arguments
from quire.ipc.sampling import SamplingParams
from quire.ipc.text_config import text_fields
from quire.workers.layers.experts import Experts
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import dummy_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.family_table import parse_model_config, read_model_config
from quire.workers.models.transformers.experts import StackedExperts
from quire.workers.models.transformers.layers import FlatEmbedding, FlatLayerNorm, FlatRMSNorm, FusedMLP, JoinedLinear
from quire.workers.models.transformers.mixing import OnlyAttentionMixes
from quire.workers.models.transformers.model import TransformersLM
from quire.workers.models.transformers.recognise import layer_norm_of
from quire.workers.parallel import Parallel

RESULTS = json.loads((Path(__file__).parents[2] / "docs/tools/transformers_models.json").read_text())
ALWAYS = ("llama", "gpt2", "deepseek_v3", "opt", "mamba", "bart", "gemma2")  # heads, names and refusals of several kinds
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def built(name, dtype=torch.float32):
    return build_model(read_model_config(tiny_models.tiny_model(name), model_impl="transformers"), dtype, Parallel())


@pytest.mark.parametrize(
    "model_type", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_a_model_of_transformers_is_what_the_documentation_says(model_type):
    found = outcome(model_type)
    assert found.result == RESULTS["models"][model_type]["result"], found.reason
    assert found.result != "wrong"


def test_at_least_110_of_transformers_models_run():
    results = [row["result"] for row in RESULTS["models"].values()]
    assert results.count("equal") >= 110 and "wrong" not in results
    assert all(row["reason"] for row in RESULTS["models"].values() if row["result"] != "equal")


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss"])
def test_both_implementations_give_the_same_tokens(name):
    folder = tiny_models.tiny_model(name)
    outputs = [
        InlineEngine(folder, model_options={"model_impl": impl}, budget=24).generate(prompts(), GREEDY)
        for impl in ("quire", "transformers")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "form",
    [
        "gptq",
        "mixed",
        *(pytest.param(form, marks=pytest.mark.slow) for form in FORMATS if form not in ("gptq", "mixed")),
    ],
)
def test_quantized_checkpoints_give_the_same_tokens(form, tmp_path):
    quantized("qwen2-mixed", form, tmp_path / "model")
    outputs = [
        InlineEngine(tmp_path / "model", model_options={"model_impl": impl}).generate(prompts(), GREEDY)
        for impl in ("quire", "transformers")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("model_options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_model_options_apply(model_options):
    folder = tiny_models.tiny_model("llama-tied")
    outputs = [
        InlineEngine(folder, model_options={**model_options, "model_impl": impl}).generate(prompts(), GREEDY)
        for impl in ("quire", "transformers")
    ]
    assert outputs[0] == outputs[1]


def test_a_short_model_runs_two_layers_of_each_kind():
    model = built("qwen2-mixed")
    dummy_weights(model, 0)
    ids, seen = torch.arange(4, dtype=torch.int32), []

    def attend(layer, qkv, q_norm, k_norm, sinks=None):
        seen.append(layer)
        spec = model.config.layers[layer].attention
        return qkv[:, : spec.num_heads * spec.head_dim].clone()

    windows = [layer.attention.window for layer in model.config.layers]
    with torch.inference_mode(), model.short():
        model.forward(ids, context_of(attend, ids))
    assert seen == [i for i, window in enumerate(windows) if windows[:i].count(window) < 2]
    with torch.inference_mode():
        model.compute_logits(model.forward(ids, context_of(attend, ids)))
    assert seen[-len(windows) :] == list(range(len(windows)))


def test_a_tied_head_of_two_values_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.tiny_model("llama-tied"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"ties lm_head.weight to model.embed_tokens.weight"):
        InlineEngine(folder, model_options=MODEL_OPTIONS)


def test_missing_and_surplus_tensors_are_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.tiny_model("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    moved = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file({**tensors, "model.layers.1.mlp.other.weight": moved}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing: model.layers.1.mlp.up_proj.weight; surplus: model.layers.1.mlp.other"):
        InlineEngine(folder, model_options=MODEL_OPTIONS)


def test_positions_that_older_checkpoints_hold_are_passed_over(tmp_path):
    model = tiny_random(tiny_config("roberta"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "roberta.embeddings.position_ids": torch.arange(256)[None]}, tmp_path / "model.safetensors")
    engine = InlineEngine(tmp_path, model_options=MODEL_OPTIONS, max_model_len=128)
    assert engine.generate(prompts(), GREEDY) == greedy(model, prompts())


def test_vllms_name_is_taken():
    assert engine_options({"model_impl": "vllm"}) == {"model_impl": "quire"}
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert parser.parse_args(["--model-impl", "vllm"]).model_impl == "quire"
    assert parser.parse_args(["--model-impl", "transformers"]).model_impl == "transformers"


def test_auto_takes_our_own_family_first():
    assert isinstance(build_model(read_model_config(tiny_models.tiny_model("llama")), torch.float32, Parallel()), CausalLM)


def test_layers_are_ours():
    model = built("llama")
    kinds = [type(module) for module in model.modules()]
    layers = len(model.config.layers)
    assert isinstance(model, TransformersLM)
    assert (
        kinds.count(JoinedLinear) == layers and kinds.count(FusedMLP) == layers and kinds.count(FlatRMSNorm) == 2 * layers + 1
    )
    assert {layer.attention.rope.type for layer in model.config.layers} == {"default"}
    assert StackedExperts in [type(module) for module in built("qwen3-moe").modules()]
    assert Experts not in kinds and kinds.count(FlatEmbedding) == 1 and nn.Embedding not in kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "has_bias"), [("gpt-neox", True), ("phi", True), ("cohere", False)])
def test_layer_norms_are_ours(name, has_bias, dtype):
    model = built(name, dtype)
    norms = [module for module in model.modules() if isinstance(module, FlatLayerNorm)]
    assert len(norms) >= len(model.config.layers) + 1
    assert {module.bias is not None for module in norms} == {has_bias}


def test_what_is_almost_a_layer_norm_is_none():
    assert layer_norm_of(nn.LayerNorm(16), torch.bfloat16) == (16, 1e-5, True)
    assert layer_norm_of(nn.LayerNorm(16, eps=1e-3, bias=False), torch.float16) == (16, 1e-3, False)
    for wrong in (nn.LayerNorm((4, 4)), nn.LayerNorm(16, elementwise_affine=False), nn.BatchNorm1d(16), nn.RMSNorm(16)):
        assert layer_norm_of(wrong, torch.float32) is None

    class PlusOne(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)

    assert layer_norm_of(PlusOne(16), torch.float32) is None


def test_norms_that_add_one_are_told_from_those_that_do_not():
    norms = {module._weighs for module in built("gemma2", torch.bfloat16).modules() if isinstance(module, FlatRMSNorm)}
    assert norms == {"plus_one"}
    norms = {module._weighs for module in built("llama", torch.bfloat16).modules() if isinstance(module, FlatRMSNorm)}
    assert norms == {"rounded"}


def test_windows_softcaps_scales_and_sinks_are_the_models():
    specs = [layer.attention for layer in built("gemma2").config.layers]
    own = [layer.attention for layer in read_model_config(tiny_models.tiny_model("gemma2")).layers]
    assert [(s.window, s.softcap, s.scale) for s in specs] == [(s.window, s.softcap, s.scale) for s in own]
    assert all(layer.attention.has_sinks for layer in built("gpt-oss").config.layers)


def fields_of(name, **changes):
    return {**json.loads((tiny_models.tiny_model(name) / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "new_model", "auto_map": {"AutoModel": "x.Y"}}, "code that comes with a checkpoint is not run"),
        ({"model_type": "new_model"}, "not known to transformers"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not the causal language model"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embedding is dynamic"),
        ({"num_attention_heads": "four"}, "cannot read config.json"),
    ],
)
def test_what_cannot_run_is_refused_by_its_reason(changes, reason):
    with pytest.raises(ModelConfigError, match=reason):
        parse_model_config(fields_of("llama", **changes), model_impl="transformers")


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2"])
def test_a_window_of_nothing_is_refused(name):
    """transformers masks every key then and takes the mean of all values, later ones too: nobody means that by 0."""
    with pytest.raises(ModelConfigError, match="its window is 0"):
        parse_model_config(fields_of(name, sliding_window=0), model_impl="transformers")


def test_heads_that_their_keys_do_not_divide_are_refused():
    with pytest.raises(ModelConfigError, match="has 4 heads for 3 of keys"):
        parse_model_config(fields_of("llama", num_key_value_heads=3), model_impl="transformers")


@pytest.mark.parametrize("first", ["type", "rope_type"])
def test_of_two_rope_types_transformers_rope_type_counts(first):
    """Whichever comes first. The other may be one that its parameters do not do for."""
    kinds = {"type": "yarn", "rope_type": "default"}
    rope = {first: kinds[first], **kinds, "rope_theta": 5e3, "factor": 8.0}
    fields = {**fields_of("llama"), "rope_parameters": rope}
    found = parse_model_config(fields, model_impl="transformers").layers[0].attention.rope
    assert found is not None and (found.type, found.theta) == ("default", 5e3)


def test_a_weight_of_no_elements_is_refused():
    """A CPU's products know none of no inputs."""
    with pytest.raises(ModelConfigError, match=r"shared_experts.gate_proj.weight has no elements"):
        parse_model_config(fields_of("glm4-moe", n_shared_experts=0), model_impl="transformers")


def test_longrope_that_attention_cannot_take_over_is_refused():
    """Of cohere2 every fourth layer does not rotate, but a config does not say so."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ModelConfigError, match=r"longrope, and .*3.self_attn does not leave it to attention"):
        parse_model_config(fields_of("cohere2", rope_parameters=rope | factors), model_impl="transformers")


def test_longrope_of_a_part_of_each_head_is_recognised():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64}
    fields = fields_of("phi3-longrope", original_max_position_embeddings=64)
    config = parse_model_config(
        {**fields, "rope_parameters": {**rope, "short_factor": [1.0, 1.5] * 2, "long_factor": [2.0, 3.0] * 2}},
        model_impl="transformers",
    )
    ropes = {layer.attention.rope for layer in config.layers}
    assert {(rope.rotary_dim, rope.type, rope.factor) for rope in ropes} == {(8, "longrope", 32.0)}


def test_longrope_of_phi_moe_is_served_up_to_its_original_length(tmp_path):
    """Its module asks for the longest position of a step, and has scales of its own; beyond, transformers mixes both."""
    small = tiny_config("phimoe").to_dict()
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.4}
    rope |= {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = tiny_random(type(tiny_config("phimoe"))(**{**small, "rope_parameters": rope, "sliding_window": 256}))
    model.save_pretrained(tmp_path)
    engine = InlineEngine(tmp_path, model_options=MODEL_OPTIONS, budget=16, max_model_len=64)
    assert engine.generate(prompts(), GREEDY) == greedy(model, prompts())
    assert engine.model.config.longest == 64 and {a.rope.type for a in engine.model.config.attention_specs(Parallel())} == {
        "longrope"
    }


def test_hunyuans_rotation_is_fixed_though_its_configs_call_it_dynamic(tmp_path):
    config = tiny_config("hunyuan_v1_dense")
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    fields = {**config.to_dict(), "rope_parameters": None, "rope_scaling": rope, "rope_theta": 10000.0}
    model = tiny_random(type(config).from_dict(fields))
    model.save_pretrained(tmp_path)
    assert InlineEngine(tmp_path, model_options=MODEL_OPTIONS).generate(prompts(), GREEDY) == greedy(model, prompts())
    fields = {**fields, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "architectures": ["HunYuanDenseV1ForCausalLM"]}
    with pytest.raises(ModelConfigError, match="dynamic: frequencies that depend on the length"):
        parse_model_config(fields)


def test_a_layers_experts_may_be_more_than_there_is_memory():
    sizes = {"num_experts": 64, "moe_intermediate_size": 1 << 20, "hidden_size": 1 << 15, "num_hidden_layers": 1}
    fields = {**tiny_config("qwen3_moe").to_dict(), **sizes, "layer_types": None, "architectures": ["Qwen3MoeForCausalLM"]}
    assert parse_model_config(fields, model_impl="transformers").hidden_size == 1 << 15


def test_published_spellings_of_a_class_are_taken():
    fields = {**tiny_config("phimoe").to_dict(), "architectures": ["PhiMoEForCausalLM"]}  # transformers says PhimoeForCausalLM
    assert parse_model_config(fields).architecture == "PhiMoEForCausalLM"
    with pytest.raises(ModelConfigError, match="PhiMoEModel is not the causal language model of its model_type"):
        parse_model_config({**fields, "architectures": ["PhiMoEModel"]})
    fields = {**tiny_config("internlm3").to_dict(), "architectures": ["InternLM3ForCausalLM"]}  # LlamaForCausalLM
    assert parse_model_config(fields).architecture == "InternLM3ForCausalLM"


def test_a_refusal_of_auto_names_both_reasons():
    with pytest.raises(ModelConfigError, match=r"architecture MambaForCausalLM is not supported.*recurrent"):
        parse_model_config({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})


def test_a_model_without_a_family_is_refused_where_transformers_is_not_asked():
    fields = fields_of("llama", architectures=["Starcoder2ForCausalLM"], model_type="starcoder2")
    with pytest.raises(ModelConfigError, match=r"--model-impl quire: architecture Starcoder2ForCausalLM .* auto tries"):
        parse_model_config(fields, model_impl="quire")
    with pytest.raises(ModelConfigError, match='lacks "architectures"'):
        parse_model_config({**fields, "architectures": "Starcoder2ForCausalLM"})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts"])
def test_layers_and_experts_without_end_are_refused(name):
    fields = json.loads(tiny_config("starcoder2").to_json_string()) | {"architectures": ["Starcoder2ForCausalLM"]}
    for number in (1 << 62, 1e300):
        with pytest.raises(ModelConfigError, match=f"config.json: {name} is .*: at most 2048 are supported"):
            parse_model_config({**fields, name: number})


def test_positions_that_begin_behind_the_padding_token_leave_fewer_tokens():
    fields = {"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "is_decoder": True, "num_hidden_layers": 1}
    assert parse_model_config({**fields, "max_position_embeddings": 514, "pad_token_id": 1}).longest == 512
    assert read_model_config(tiny_models.tiny_model("llama"), model_impl="transformers").longest is None


def test_whispers_positions_are_known_where_the_model_is_served():
    """It calls them max_target_positions: the core read none, and the worker took the model for one without a limit."""
    fields = json.loads(tiny_config("whisper").to_json_string()) | {"architectures": ["WhisperForCausalLM"]}
    assert parse_model_config(fields).max_position_embeddings == text_fields(fields)["max_position_embeddings"] == 448
    assert text_fields({"model_type": "mpt", "max_seq_len": 2048})["max_position_embeddings"] == 2048


def test_several_ranks_are_refused():
    config = read_model_config(tiny_models.tiny_model("llama"), model_impl="transformers")
    for size in (2, 3):  # three would not fit its heads
        with pytest.raises(ModelConfigError, match="one GPU"):
            build_model(config, torch.float32, Parallel(0, size))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x.cumsum(1),
        lambda x: x.sum(1),
        lambda x: x.mean(dim=(0, 1)),
        lambda x: x.roll(1, 1),
        lambda x: x[:, 1:],
        lambda x: x[:, 0],
        lambda x: x @ x.transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0)),
        lambda x: torch.nn.functional.conv1d(x.transpose(1, 2), torch.zeros(8, 8, 4, device="meta"), padding=3),
        lambda x: x + torch.arange(37, device="meta")[None, :, None],
    ],
)
def test_what_mixes_tokens_is_seen(mix):
    x = torch.zeros(1, 37, 8, device="meta")
    with pytest.raises(ModelConfigError, match="tokens meet outside attention"), OnlyAttentionMixes(37):
        mix(x)


def test_what_treats_tokens_alike_is_let_through():
    x = torch.zeros(1, 37, 8, device="meta")
    with OnlyAttentionMixes(37):
        (x @ torch.zeros(8, 4, device="meta")).softmax(-1).sum(-1)
        x.reshape(37, 8).topk(2, -1), x.transpose(1, 2).mean(1), x[..., :4], torch.cat((x, x), -1), x.var(-1)
