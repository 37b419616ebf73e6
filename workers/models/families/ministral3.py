"""Ministral 3: Llama's block, yarn, and queries scaled by position beyond the original length. Published checkpoints have it
within a multimodal model (wrappers.py).
"""

from typing import Any

import msgspec

from quire.workers.models.config import LayerSpec, TemperatureConfig
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import (
    Json,
    number,
    read_attention,
    rope_parameters,
    size,
    sliding_window,
    uniform_windows,
    with_windows,
)
from quire.workers.models.spellings import ACTIVATIONS, activation

BETA = "llama_4_scaling_beta"
DEFAULT_ROPE: dict[str, Any] = {  # of Ministral 3
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1,
}  # fmt: skip
STRETCHING = ("yarn", "llama3", "longrope")  # rotations with original positions; absent ones are all positions


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    where, params = rope_parameters(fields)
    inert = ("max_position_embeddings",)  # in parameters: repeats the model's own
    params = {name: value for name, value in (params or DEFAULT_ROPE).items() if name not in inert}
    return {"rms_norm_eps": 1e-5, "sliding_window": None, **fields, where: params}


def read_temperature(fields: Json) -> TemperatureConfig | None:
    """The temperature in the rotary parameters, also Mistral 4's. 0 and null mean none."""
    where, params = rope_parameters(fields)
    if params.get(BETA) in (None, 0):
        return None
    of_scaled = size(fields, "max_position_embeddings") if params.get("rope_type", params.get("type")) in STRETCHING else None
    original = size(params, "original_max_position_embeddings", of_scaled)
    return TemperatureConfig(beta=number(params, BETA, 0.0, where), original_max_position_embeddings=original)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    where, params = rope_parameters(fields)
    plain = {**fields, where: {name: value for name, value in params.items() if name != BETA}}
    attention = read_attention(plain, default_kv_heads=8, default_head_dim=128)
    attention = msgspec.structs.replace(attention, temperature=read_temperature(fields))
    inner, act = size(fields, "intermediate_size"), activation(fields)
    windows = uniform_windows(fields, "ministral3", sliding_window(fields))
    return tuple(LayerSpec(attention=a, intermediate_size=inner, activation=act) for a in with_windows(attention, windows))


FAMILY = Family(
    "ministral3",
    frozenset(),
    read_layers,
    LlamaBlock,
    plain_fields=plain_fields,
    activations=frozenset(ACTIVATIONS),
)
