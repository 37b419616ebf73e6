"""Models with recurrent layers, in one pass over a sequence, against transformers; and on ranks that split their heads."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny_hybrids
import torch
from recurrent_states import poisoned_states
from safetensors.torch import load_file
from step_contexts import context_of
from thread_ranks import on_every_rank
from tiny_models import reference, tiny_model
from workers.test_models import DenseAttention

from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config, read_model_config
from quire.workers.parallel import Parallel

IDS = torch.randint(4, 500, (97,), generator=torch.Generator().manual_seed(1)).int()
ALWAYS = [name if name in tiny_hybrids.FIRST else pytest.param(name, marks=pytest.mark.slow) for name in tiny_hybrids.MODELS]

OTHERS = [("lfm2", 2), ("lfm2-moe", 2), ("lfm2-tied", 2), ("kimi-linear", 2), ("kimi-linear-groups", 4)]


def logits_of(name, parallel, fill=load_weights):
    return pass_of(read_model_config(tiny_model(name)), tiny_model(name), parallel, fill)


def pass_of(config, folder, parallel, fill=load_weights):
    model = build_model(config, torch.float32, parallel)
    if fill is load_weights:
        load_weights(model, folder, "cpu", progress=False)
    else:
        fill(model, 0)
    context = context_of(
        DenseAttention(config.attention_specs(parallel)), torch.arange(len(IDS)).int(), poisoned_states(config, parallel)
    )
    with torch.inference_mode():
        hidden = model(IDS, context)
        last = model(IDS, context, torch.tensor([96], dtype=torch.int32))
        torch.testing.assert_close(last[0], hidden[96], rtol=1e-4, atol=1e-4)
        return model.compute_all_logits(hidden)


@pytest.mark.parametrize("name", ALWAYS)
def test_a_pass_over_a_sequence_equals_transformers(name):
    with torch.inference_mode():
        want = reference(name)(IDS[None].long()).logits[0]
    torch.testing.assert_close(logits_of(name, Parallel()), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["nemotron-h", "kimi-linear"])
def test_a_head_of_its_own_is_not_tied_where_transformers_does_not(name, tmp_path):
    fields = json.loads((tiny_model(name) / "config.json").read_text())
    shutil.copytree(tiny_model(name), tmp_path / "tied")
    (tmp_path / "tied" / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    got = pass_of(read_model_config(tmp_path / "tied"), tmp_path / "tied", Parallel())
    assert torch.equal(got, logits_of(name, Parallel()))


@pytest.mark.parametrize("name", ["nemotron-h", "qwen3.5"])
def test_a_state_that_is_not_reset_is_seen(name):
    config = read_model_config(tiny_model(name))
    model = build_model(config, torch.float32, Parallel())
    load_weights(model, tiny_model(name), "cpu", progress=False)
    attend, states = DenseAttention(config.attention_specs(Parallel())), poisoned_states(config, Parallel())
    context = context_of(attend, torch.arange(len(IDS)).int(), states)
    goes_on = replace(context, states=replace(context.states, first=context.states.own))
    with torch.inference_mode():
        first, again, other = (model(IDS, given) for given in (context, context, goes_on))
    assert torch.equal(first, again) and (other - first).abs().max() > 0.1


MAMBAS = [("nemotron-h", 4), ("granite-4", 2), ("falcon-h1-norm", 2)]  # with groups shared by two ranks each


@pytest.mark.parametrize("fill", [load_weights, dummy_weights])
@pytest.mark.parametrize(("name", "size"), [("qwen3.5", 4), ("qwen3-next", 2), ("qwen3-next", 4), *MAMBAS, *OTHERS])
def test_ranks_together_are_the_whole_model(name, size, fill):
    """Four ranks share the two key heads, or the two groups of Mamba's heads, whose norm is of a whole group."""
    [alone], _ = on_every_rank(1, lambda parallel: logits_of(name, parallel, fill))
    parts, _ = on_every_rank(size, lambda parallel: logits_of(name, parallel, fill))
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("expert_parallel", "quantization"), [(True, None), (False, "int8")])
@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-latent"])
def test_experts_without_a_gate_on_ranks_and_quantized(name, expert_parallel, quantization, tmp_path):
    """From a tensor of each expert, and from one of all, as transformers 5 has them in memory."""
    reference(name).save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.norm.weight" in load_file(tmp_path / "model.safetensors")
    found = []
    for folder in (tiny_model(name), tmp_path):
        config = read_model_config(folder, quantization=quantization)
        parts, _ = on_every_rank(
            2, lambda parallel, of=(config, folder): pass_of(*of, parallel), expert_parallel=expert_parallel
        )
        found.append(parts[0])
    [alone], _ = on_every_rank(1, lambda parallel: logits_of(name, parallel))
    assert torch.equal(*found)
    if quantization is None:
        torch.testing.assert_close(found[0], alone, rtol=1e-3, atol=1e-3)
    else:
        assert torch.corrcoef(torch.stack((found[0].flatten(), alone.flatten())))[0, 1] > 0.98


def test_the_rank_holds_its_heads_of_a_state():
    config = read_model_config(tiny_model("qwen3.5"))
    [tail, matrix] = config.state_tensors(Parallel())[0]
    assert (tail.shape, tail.is_recurrent) == ((3, 2 * 2 * 16 + 4 * 24), False)
    assert (matrix.shape, matrix.is_recurrent) == ((4, 16, 24), True)
    [tail, matrix] = config.state_tensors(Parallel(3, 4))[0]
    assert tail.shape == (3, 2 * 16 + 24)
    assert matrix.shape == (1, 16, 24)
    assert sorted(config.state_tensors(Parallel())) == [0, 2, 3]


def test_ranks_that_cannot_split_the_heads_are_refused():
    fields = {**json.loads((tiny_model("qwen3.5") / "config.json").read_text()), "num_attention_heads": 6}
    fields |= {"num_key_value_heads": 3, "linear_num_value_heads": 4, "intermediate_size": 120}
    with pytest.raises(ModelConfigError, match="4 value heads of linear attention cannot be split over 3 ranks; 1 would do"):
        build_model(parse_model_config(fields), torch.float32, Parallel(0, 3))


PUBLISHED = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "mtp_use_dedicated_embeddings": False,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152},
}


def test_a_published_config_is_read():
    config = parse_model_config(PUBLISHED)
    assert [i for i, layer in enumerate(config.layers) if layer.attention.is_there] == list(range(3, 40, 4))
    spec = config.layers[3].attention
    assert (spec.rope.rotary_dim, spec.rope.theta, spec.qk_norm_weighs) == (64, 1e7, "plus_one")
    assert (config.state_dtype, config.dtype, config.layers[0].intermediate_size) == ("float32", "bfloat16", 0)
    by_layer = config.state_tensors(Parallel())
    in_bytes = sum(4 * torch.Size(t.shape).numel() for tensors in by_layer.values() for t in tensors if t.is_recurrent)
    assert in_bytes == 60 << 20
    assert config.names.is_ignored("mtp.layers.0.mlp.gate.weight") and config.names.is_ignored(
        "model.visual.merger.norm.weight"
    )
    assert config.names.in_model("model.language_model.layers.0.linear_attn.A_log") == "model.layers.0.linear_attn.A_log"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layer_types": ["linear_attention"]},
            "layer_types must list linear_attention or full_attention for each of 40 layers",
        ),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate to False: only True is supported"),
        ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype .*int8.* is not supported; supported are float32, bfloat16, float16"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers to .*3.*: only .* is supported"),
    ],
)
def test_what_is_not_served_is_named(changes, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config({**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **changes}})


def test_a_config_of_the_text_model_alone_keeps_the_sections_of_its_rotation():
    alone = parse_model_config(PUBLISHED["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"]})
    assert alone.layers == parse_model_config(PUBLISHED).layers
