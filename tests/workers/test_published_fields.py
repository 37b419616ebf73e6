"""Newer families and wrappers with the fields that their published configs have: read to the right number of parameters.

published_fields.json was gathered from public descriptions of these configs; it has their fields, not their bytes.
"""

import json
from pathlib import Path

import pytest
import torch

from quire.ipc.text_config import text_fields
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.parallel import Parallel

FIELDS = json.loads((Path(__file__).parent / "published_fields.json").read_bytes())
PARAMETERS = {  # in billions, of the text model
    "GLM-4.5V": 106.0,
    "GLM-4.7-Flash": 29.9,
    "Hy3-preview": 295.0,
    "Kimi-K2.5": 1026.0,
    "Kimi-Linear-48B-A3B": 49.1,
    "LFM2-1.2B": 1.17,
    "LFM2-8B-A1B": 8.34,
    "MiMo-V2-Flash": 309.0,
    "Qwen2.5-VL-7B": 7.6,
    "Qwen3-VL-30B-A3B": 30.5,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_is_read_to_the_right_size(name):
    config = parse_model_config(FIELDS[name])
    with torch.device("meta"):
        model = build_model(config, torch.bfloat16, Parallel(device="meta"))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    core = text_fields(FIELDS[name])
    assert (core["vocab_size"], core["max_position_embeddings"]) == (config.vocab_size, config.max_position_embeddings)


def test_each_has_a_number():
    assert FIELDS.keys() == PARAMETERS.keys()


def test_mimos_layers_are_those_of_its_pattern():
    config = parse_model_config(FIELDS["MiMo-V2-Flash"])
    seen = [(x.attention.window, x.attention.num_kv_heads, x.attention.has_sinks) for x in config.layers[:6]]
    assert seen == [(0, 4, False), *[(129, 8, True)] * 4, (0, 4, False)]
    assert [x.experts is not None for x in config.layers[:3]] == [False, True, True]
    assert {x.attention.rope.theta for x in config.layers} == {5e6, 1e4}
    assert {x.attention.rope.rotary_dim for x in config.layers} == {64}
    assert {x.values for x in config.layers} == {(128, 0.707)}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("MiMo-V2-Flash", {"attention_projection_layout": "fused_qkv"}, "attention_projection_layout to 'fused_qkv'"),
        ("MiMo-V2-Flash", {"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern must list 0 or 1"),
        ("MiMo-V2-Flash", {"hybrid_layer_pattern": [0, 1]}, "layer_types must list 48 layers"),
        ("MiMo-V2-Flash", {"moe_layer_freq": [0, 1]}, "mlp_layer_types must list dense or sparse"),
        ("MiMo-V2-Flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ("MiMo-V2-Flash", {"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim 256 is greater than head_dim 192"),
        ("MiMo-V2-Flash", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ("MiMo-V2-Flash", {"rope_parameters": {"sliding_attention": 5}}, "rope_parameters must have"),
        ("Hy3-preview", {"qk_norm": False}, "qk_norm"),
        ("Hy3-preview", {"route_norm": False}, "route_norm"),
        ("Hy3-preview", {"num_dreams": 3}, "num_dreams"),
        ("GLM-4.7-Flash", {"topk_method": "greedy"}, "topk_method"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must list dense or sparse for each of 47"),
        ("GLM-4.7-Flash", {"num_dreams": 3}, "num_dreams"),
        ("Qwen2.5-VL-7B", {"num_dreams": 3}, "num_dreams"),
    ],
)
def test_what_cannot_be_served_is_said(name, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config({**FIELDS[name], **changes})
