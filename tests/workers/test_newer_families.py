"""Mistral 4, Llama 4 and Gemma 4: what their configs say where it is absent, what they are refused for, and their sizes."""

import pytest
import torch

from quire.ipc.text_config import text_fields
from quire.kernels.experts.routing_reference import Routing, route
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.parallel import Parallel

MISTRAL4 = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "tie_word_embeddings": False, "vision_config": {"model_type": "llama4_vision_model"},
    "text_config": {
        "model_type": "llama4_text", "max_position_embeddings": 10485760, "num_local_experts": 16, "rope_theta": 500000.0,
        "attn_temperature_tuning": 4, "for_llm_compressor": False, "no_rope_layers": [], "torch_dtype": "bfloat16",
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
}  # fmt: skip
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "vision_config": {"model_type": "gemma4_vision"},
    "image_token_id": 258880, "tie_word_embeddings": True,
    "text_config": {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None},
}  # fmt: skip
SHARING = {
    "num_hidden_layers": 35, "hidden_size": 1536, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip
EXPERTS = {
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 512,
}  # fmt: skip
MAVERICK = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None}


def parameters(fields):
    """In billions."""
    with torch.device("meta"):
        model = build_model(parse_model_config(fields), torch.bfloat16, Parallel(device="meta"))
    return sum(p.numel() for p in model.parameters()) / 1e9


def within(fields, **changes):
    """With these in its text_config."""
    return {**fields, "text_config": {**fields["text_config"], **changes}}


def test_mistral_small_4_has_119_billion_parameters():
    assert parameters(MISTRAL4) == pytest.approx(119, rel=0.01)
    config = parse_model_config(MISTRAL4)
    assert config.architecture == "Mistral4ForCausalLM"
    core = text_fields(MISTRAL4)
    assert (core["vocab_size"], core["max_position_embeddings"]) == (config.vocab_size, config.max_position_embeddings)
    spec = config.layers[0].attention
    assert (spec.head_dim, spec.latent_dim, spec.rope.type, spec.temperature.beta) == (320, 256, "yarn", 0.1)


def test_scout_has_108_billion_parameters_without_its_images_and_maverick_400():
    assert parameters(SCOUT) == pytest.approx(107.8, rel=0.01)
    assert parameters(within(SCOUT, **MAVERICK)) == pytest.approx(400, rel=0.01)
    layers = parse_model_config(SCOUT).layers
    seen = [(x.attention.window, x.attention.is_chunked, x.attention.rope is None) for x in layers[:5]]
    assert seen == [(8192, True, False)] * 3 + [(0, False, True), (8192, True, False)]
    tuned = [layer.attention.temperature is not None for layer in layers[:4]]
    assert tuned == [False, False, False, True] and layers[0].attention.qk_norm_eps == 1e-5
    config = parse_model_config(within(SCOUT, **MAVERICK))
    assert [layer.experts is not None for layer in config.layers[:4]] == [False, True, False, True]
    core = text_fields(SCOUT)
    assert (core["vocab_size"], core["max_position_embeddings"]) == (config.vocab_size, config.max_position_embeddings)
    assert config.layers[0].attention.qk_norm_eps is None and config.layers[0].intermediate_size == 16384


def test_llama_4_without_experts_needs_no_number_of_them():
    """As MobileLLM-R1 is published."""
    none = {"num_local_experts": 0, "num_experts_per_tok": 0, "moe_layers": []}
    small = {"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 64, "num_hidden_layers": 22}
    dense = within(SCOUT, **small, **none, intermediate_size_mlp=6144, vocab_size=128256, interleave_moe_layer_step=0)
    assert {layer.experts for layer in parse_model_config(dense).layers} == {None}
    with pytest.raises(ModelConfigError, match="num_local_experts must be a positive integer, not 0"):
        parse_model_config(within(SCOUT, **small, num_local_experts=0))


def test_a_temperature_of_0_is_none():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 4096}
    spec = parse_model_config(within(MISTRAL4, rope_parameters={**rope, "llama_4_scaling_beta": 0.0})).layers[0].attention
    assert spec.temperature is None and spec.rope.type == "yarn"


def test_gemma_4s_layers_have_heads_of_their_kind_and_read_the_last_of_it():
    config = parse_model_config(within(GEMMA4, **SHARING))
    heads = [(x.attention.window, x.attention.head_dim, x.attention.num_kv_heads) for x in config.layers[:5]]
    assert heads == [(512, 256, 1)] * 4 + [(0, 512, 1)]
    assert [layer.attention.shares for layer in config.layers[13:20]] == [None, None, 13, 13, 13, 13, 14]
    assert {layer.intermediate_size for layer in config.layers} == {6144, 12288}
    assert (config.model.per_layer.size, config.model.per_layer.vocab_size) == (256, 262144)
    ropes = {layer.attention.window: layer.attention.rope for layer in config.layers}
    assert (ropes[0].type, ropes[0].proportion, ropes[0].theta) == ("proportional", 0.25, 1e6)
    assert (ropes[512].type, ropes[512].theta) == ("default", 1e4)
    assert {layer.attention.scale for layer in config.layers} == {1.0}
    core = text_fields(within(GEMMA4, **SHARING))
    assert (core["vocab_size"], core["max_position_embeddings"]) == (config.vocab_size, config.max_position_embeddings)


def test_gemma_4s_experts_stand_beside_the_mlp_and_keys_are_values_where_everything_is_seen():
    config = parse_model_config(within(GEMMA4, **EXPERTS))
    sixth = config.layers[5]
    assert (sixth.attention.window, sixth.attention.num_kv_heads, sixth.keys_are_values) == (0, 2, True)
    assert not config.layers[0].keys_are_values and config.model.per_layer is None
    assert sixth.experts.routing.top_k == 8 and sixth.experts.act.cubic == 0.044715
    as_transformers_writes_it = {
        **{name: value for name, value in EXPERTS.items() if name not in ("num_global_key_value_heads", "global_head_dim")},
        "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)},
    }
    assert parse_model_config(within(GEMMA4, **as_transformers_writes_it)) == config


def test_logits_choose_where_their_sigmoids_are_equal():
    routing = Routing(num_experts=4, top_k=1, scores="sigmoid", by_logits=True)
    ids, weights = route(torch.tensor([[30.0, 25.0, 40.0, 39.0]]), routing)
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[1.0]])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (within(SCOUT, attention_chunk_size=None), "attention_chunk_size"),
        (within(SCOUT, layer_types=["sliding_attention"] * 48), "layer_types must list"),
        (within(SCOUT, no_rope_layers=[1, 2]), "no_rope_layers"),
        (within(SCOUT, moe_layers="all"), "moe_layers"),
        (within(SCOUT, attn_temperature_tuning="yes"), "attn_temperature_tuning"),
        (within(SCOUT, rope_scaling={"rope_type": "yarn", "factor": 2.0}), "use_qk_norm"),
        (within(SCOUT, num_dreams=3), "num_dreams"),
        (within(GEMMA4, use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (within(GEMMA4, vocab_size_per_layer_input=1000), "vocab_size_per_layer_input"),
        (within(GEMMA4, num_kv_shared_layers=30), "num_kv_shared_layers"),
        (within(GEMMA4, num_kv_shared_layers=26), "num_kv_shared_layers"),
        (within(GEMMA4, per_layer_config={"5": {"sliding_window": 3}}), "per_layer_config sets sliding_window"),
        (within(GEMMA4, per_layer_config={"99": {}}), "per_layer_config must be"),
        (within(GEMMA4, rope_parameters={"full_attention": {}}), "sliding_attention"),
        (within(GEMMA4, layer_types=["chunked_attention"] * 30), "chunked_attention"),
        (within(GEMMA4, **{**EXPERTS, "hidden_activation": "gelu"}), "hidden_activation"),
        (within(GEMMA4, enable_moe_block=True), "top_k_experts"),
        (within(GEMMA4, num_dreams=3), "num_dreams"),
        (within(MISTRAL4, attention_bias=True), "attention_bias"),
        (within(MISTRAL4, partial_rotary_factor=0.3), "partial_rotary_factor"),
        (within(MISTRAL4, num_dreams=3), "num_dreams"),
        (within(MISTRAL4, n_group=3), "n_group 3"),
    ],
)
def test_what_cannot_be_served_is_said(fields, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config(fields)
