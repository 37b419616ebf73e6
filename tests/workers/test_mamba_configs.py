"""Configs of families with Mamba 2 layers: published ones are read to the right sizes, and what is not served is named.

mamba_fields.json was gathered from public descriptions of these configs; it has their fields, not their bytes.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from quire.ipc.text_config import keeps_states, text_fields
from quire.workers.memory import sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.parallel import Parallel

FIELDS = json.loads((Path(__file__).parent / "mamba_fields.json").read_bytes())
NEMOTRON_H_8B, NEMOTRON_3_NANO, GRANITE_4_TINY, CODESTRAL_MAMBA, BAMBA, FALCON_H1 = FIELDS.values()
PUBLISHED = [  # fields, billions of parameters, MiB of recurrent states in float32, layers of attention
    (NEMOTRON_H_8B, 8.1, 96, 4),
    (NEMOTRON_3_NANO, 31.6, 46, 6),
    (GRANITE_4_TINY, 6.9, 54, 4),
    (CODESTRAL_MAMBA, 7.3, 256, 0),
    (BAMBA, 9.8, 116, 3),
    (FALCON_H1, 0.52, 27, 36),
]


@pytest.mark.parametrize(("fields", "billions", "mebibytes", "attending"), PUBLISHED, ids=lambda x: str(x)[:40])
def test_a_published_config_is_read_to_the_right_sizes(fields, billions, mebibytes, attending):
    config = parse_model_config(fields)
    with torch.device("meta"):
        model = build_model(config, torch.bfloat16, Parallel(device="meta"))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
    tensors = [t for some in config.state_tensors(Parallel()).values() for t in some if t.is_recurrent]
    assert sum(4 * math.prod(t.shape) for t in tensors) == mebibytes << 20
    assert sum(layer.attention.is_there for layer in config.layers) == attending
    assert keeps_states(fields) and text_fields(fields)["max_position_embeddings"] == config.max_position_embeddings
    assert all(layer.has_cache == (layer.num_heads > 0) for layer in sizes_of(config).layers)


def test_the_names_of_both_versions_of_transformers_are_read_alike():
    types = [
        {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}[kind] for kind in NEMOTRON_3_NANO["hybrid_override_pattern"]
    ]
    newer = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in types]
    plain = {name: value for name, value in NEMOTRON_3_NANO.items() if name != "hybrid_override_pattern"}
    found = [parse_model_config({**plain, "layers_block_type": kinds}).layers for kinds in (types, newer)]
    assert found[0] == found[1] == parse_model_config(NEMOTRON_3_NANO).layers
    attention = parse_model_config(GRANITE_4_TINY).layers[5].attention
    assert attention.is_there and attention.rope is None and attention.scale == 0.0078125


def test_steps_have_bounds_and_states_a_type():
    nano = parse_model_config(NEMOTRON_3_NANO)
    assert (nano.layers[0].recurrent.dt_min, nano.layers[0].recurrent.dt_max, nano.state_dtype) == (0.001, math.inf, "float32")
    assert parse_model_config({**NEMOTRON_3_NANO, "mamba_ssm_cache_dtype": "float16"}).state_dtype == "float16"
    for infinity in ({"__float__": "Infinity"}, math.inf, None):
        limited = parse_model_config({**CODESTRAL_MAMBA, "time_step_limit": [0.01, infinity]})
        assert (limited.layers[0].recurrent.dt_min, limited.layers[0].recurrent.dt_max) == (0.01, math.inf)


@pytest.mark.parametrize(
    ("fields", "changes", "said"),
    [
        (NEMOTRON_H_8B, {"hybrid_override_pattern": None}, "lacks layers_block_type, or hybrid_override_pattern"),
        (NEMOTRON_H_8B, {"hybrid_override_pattern": "M-X"}, r"hybrid_override_pattern must have M, \*, -, E for each layer"),
        (NEMOTRON_H_8B, {"layers_block_type": ["mamba", "gru"]}, "layers_block_type must have mamba, attention"),
        (NEMOTRON_H_8B, {"num_hidden_layers": 50}, "num_hidden_layers is 50, but kinds are given of 52 layers"),
        (NEMOTRON_H_8B, {"time_step_limit": [0.0, 0.1]}, r"time_step_limit to \[0.0, 0.1\]: only \[0.0, Infinity\]"),
        (NEMOTRON_H_8B, {"mlp_hidden_act": "silu"}, "mlp_hidden_act to \"silu\": only 'relu2' is supported"),
        (NEMOTRON_H_8B, {"mamba_hidden_act": "relu"}, "mamba_hidden_act to 'relu'"),
        (NEMOTRON_H_8B, {"attention_bias": True}, "attention_bias to True"),
        (NEMOTRON_H_8B, {"n_groups": 7}, "128 Mamba heads are not a multiple of 7 groups"),
        (NEMOTRON_H_8B, {"conv_kernel": 1}, "convolution must see at least 2 tokens"),
        (NEMOTRON_H_8B, {"num_dreams": 3}, "num_dreams: not known for nemotron_h models"),
        (NEMOTRON_3_NANO, {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype .*int8.* is not supported"),
        (GRANITE_4_TINY, {"layer_types": ["mamba"]}, "layer_types must list one of mamba, attention, .* for each of 40 layers"),
        (GRANITE_4_TINY, {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        (GRANITE_4_TINY, {"mamba_n_heads": 40}, "mamba_n_heads 40 times mamba_d_head 64 is not the layers' size 3072"),
        (GRANITE_4_TINY, {"num_local_experts": -1}, "num_local_experts must be an integer from 0"),
        (CODESTRAL_MAMBA, {"num_heads": 64}, "num_heads 64 times head_dim 64 is not the layers' size 8192"),
        (CODESTRAL_MAMBA, {"time_step_limit": 3}, "time_step_limit must be a list of two numbers"),
        (CODESTRAL_MAMBA, {"time_step_limit": [1.0, "x"]}, "time_step_limit must be two numbers, the lesser first"),
        (BAMBA, {"attn_layer_indices": "9"}, "attn_layer_indices must list numbers of layers"),
        (FALCON_H1, {"ssm_multipliers": [1.0]}, "ssm_multipliers must list 5 numbers"),
        (FALCON_H1, {"mlp_multipliers": [1.0, 0]}, "mlp_multipliers must be a number greater than 0"),
    ],
)
def test_what_is_not_served_is_named(fields, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config({**fields, **changes})


@pytest.mark.parametrize(("changes", "size", "said"), [({}, 3, "128 heads of Mamba layers"), ({"n_groups": 16}, 64, None)])
def test_ranks_that_cannot_split_the_heads_are_refused(changes, size, said):
    config = parse_model_config({**CODESTRAL_MAMBA, **changes})
    if said is None:
        tail, _ = config.state_tensors(Parallel(63, size))[0]
        assert tail.shape == (3, 2 * 64 + 2 * 128)
        return
    with pytest.raises(ModelConfigError, match=f"its {said} cannot be split over {size} ranks; 1, 2, 4"):
        build_model(config, torch.float32, Parallel(0, size))
