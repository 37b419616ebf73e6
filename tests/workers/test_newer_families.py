"""Mistral 4, Llama 4 and Gemma 4: what their configs say where it is absent, what they are refused for, and their sizes."""

import pytest
import torch

from quire.enginecore.loading.text_config import text_fields
from quire.kernels.experts.routing_reference import Routing, route
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.families import parse_model_config
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
        (within(MISTRAL4, attention_bias=True), "attention_bias"),
        (within(MISTRAL4, partial_rotary_factor=0.3), "partial_rotary_factor"),
        (within(MISTRAL4, num_dreams=3), "num_dreams"),
        (within(MISTRAL4, n_group=3), "n_group 3"),
    ],
)
def test_what_cannot_be_served_is_said(fields, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config(fields)
