"""config.json: old and new spellings read alike, defaults are transformers', and what is not supported is refused by name."""

import json

import pytest
import tiny_models

from quire.ipc.text_config import text_fields
from quire.workers.attention.kv_cache import cache_groups
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import FAMILIES, parse_model_config, read_model_config
from quire.workers.parallel import Parallel

ARCHITECTURE = {family.name: name for name, family in FAMILIES.items()}


def fields(family="llama", **changes):
    """config.json of a small model; a change to `...` removes the field."""
    merged = {**tiny_models.BASE, "architectures": [ARCHITECTURE[family]], "model_type": family, **changes}
    return {name: value for name, value in merged.items() if value is not ...}


def parse(family="llama", **changes):
    return parse_model_config(fields(family, **changes))


def windows(config):
    return tuple(layer.attention.window for layer in config.layers)


def groups(config):
    return [(group.spec.window, group.layers) for group in cache_groups(config.attention_specs(Parallel()))]


def refusal(family="llama", **changes):
    with pytest.raises(ModelConfigError) as error:
        parse(family, **changes)
    return str(error.value)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_what_transformers_writes_is_read(name):
    config = read_model_config(tiny_models.tiny_model(name))
    theirs = tiny_models.reference(name).config
    assert len(config.layers) == theirs.num_hidden_layers
    for layer in config.layers:
        spec = layer.attention
        assert (spec.num_heads, spec.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (spec.head_dim, spec.scale) == (theirs.head_dim, theirs.head_dim**-0.5)
        assert (spec.rope.type, spec.rope.theta) == (theirs.rope_parameters["rope_type"], theirs.rope_parameters["rope_theta"])
        assert layer.intermediate_size == theirs.intermediate_size
    assert config.rms_norm_eps == theirs.rms_norm_eps and config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.dtype == "float32"


def test_real_configs_are_read():
    llama = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    config = parse_model_config(llama)
    [spec] = {layer.attention for layer in config.layers}
    assert (spec.head_dim, spec.q_size, spec.kv_size, config.dtype) == (128, 4096, 1024, "bfloat16")
    assert (spec.rope.type, spec.rope.theta, spec.rope.factor) == ("llama3", 500000.0, 8.0)
    qwen = {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    config = parse_model_config(qwen)
    [layer] = set(config.layers)
    assert layer.attention_bias and config.tie_word_embeddings and layer.attention.head_dim == 64
    assert groups(config) == [(0, list(range(24)))]


def test_old_and_new_spellings_mean_the_same():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = parse(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    old = parse(rope_theta=500000, rope_scaling={"type": "yarn", **scaling}, torch_dtype="bfloat16")
    assert new == old
    assert parse(rope_scaling=None, rope_theta=3.0) == parse(rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    assert parse(torch_dtype="torch.float16", dtype=None).dtype == "float16"
    assert parse().dtype is None
    first = {"max_position_embeddings": ..., "max_sequence_length": 64}  # of LLaMA's first conversions
    assert parse(**first).max_position_embeddings == text_fields({"max_sequence_length": 64})["max_position_embeddings"] == 64


def test_absent_fields_have_transformers_defaults():
    config = parse(num_key_value_heads=..., head_dim=..., initializer_range=...)
    spec = config.layers[0].attention
    assert (spec.num_kv_heads, spec.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (spec.rope.theta, config.initializer_range, config.tie_word_embeddings) == (10000.0, 0.02, False)
    assert parse("qwen3", head_dim=...).layers[0].attention.head_dim == 128
    assert parse("qwen2", head_dim=None).layers[0].attention.head_dim == 16
    assert windows(parse("mistral")) == (4096,) * 3


def test_windows_and_kv_groups():
    mixed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert windows(parse("qwen2", **mixed)) == (0, 8, 8)
    assert groups(parse("qwen3", **mixed)) == [(0, [0]), (8, [1, 2])]
    assert windows(parse("qwen2", **{**mixed, "use_sliding_window": False})) == (0, 0, 0)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(parse("qwen2", **mixed, layer_types=types)) == (8, 0, 8)
    assert groups(parse("mistral", sliding_window=5)) == [(5, [0, 1, 2])]
    assert groups(parse("mistral", sliding_window=None)) == [(0, [0, 1, 2])]
    assert windows(parse("mistral", sliding_window=5, layer_types=["sliding_attention"] * 3)) == (5, 5, 5)


def test_biases_and_qk_norm_by_family():
    def bias(*args, **changes):
        return parse(*args, **changes).layers[0].attention_bias

    assert not bias("llama") and bias("llama", attention_bias=True) and parse("llama", mlp_bias=True).layers[0].mlp_bias
    assert bias("qwen2") and not bias("qwen3") and bias("qwen3", attention_bias=True) and not bias("mistral")
    kin = ("llama", "mistral", "qwen2", "qwen3")
    eps = {name: parse(name, rms_norm_eps=1e-5).layers[0].attention.qk_norm_eps for name in kin}
    assert eps == {"llama": None, "mistral": None, "qwen2": None, "qwen3": 1e-5}


@pytest.mark.parametrize("rope_type", ["dynamic", "su", "mrope", "ntk", 3, None])
def test_other_rope_types_are_refused_by_name(rope_type):
    text = refusal(rope_scaling={"rope_type": rope_type, "factor": 2.0})
    assert json.dumps(rope_type) in text and "default, linear, llama3, yarn, longrope" in text


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"hidden_act": "mish"}, 'hidden_act to "mish"'),
        ({"hidden_act": ["relu"]}, 'hidden_act to ["relu"]'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        ({"use_mrope": True}, "use_mrope"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_experts": 8, "router_scale": 2}, "num_experts, router_scale"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 3"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": [{}]}, "is not supported"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"head_dim": None, "hidden_size": 66}, "multiple of num_attention_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, name):
    assert name in refusal(**changes)


def test_fields_of_other_families_are_refused():
    assert "use_sliding_window" in refusal("mistral", use_sliding_window=True)
    assert "attention_bias" in refusal("qwen2", attention_bias=True)
    assert "mlp_bias" in refusal("qwen3", mlp_bias=True)
    assert "contradicts" in refusal("mistral", sliding_window=4, layer_types=["full_attention"] * 3)
    assert "need a sliding window" in refusal("qwen3", layer_types=["sliding_attention"] * 3)
    assert "max_window_layers" in refusal("qwen2", max_window_layers=-1)
    assert "num_key_value_heads" in refusal("mistral", num_key_value_heads=...)


def test_fields_that_change_nothing_are_accepted():
    inert = {"_name_or_path": "x", "use_cache": False, "auto_map": {}, "transformers_version": "9", "temperature": 0.1}
    assert parse(**inert, unknown=None, quantization_config=None) == parse()


def test_unreadable_files_are_named(tmp_path):
    for text in (None, "{", "[]", "[" * 100_000):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelConfigError, match=r"config\.json"):
            read_model_config(tmp_path)
