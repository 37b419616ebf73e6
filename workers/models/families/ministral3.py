"""Ministral 3: Llama's block, yarn, and queries scaled by position beyond the original length. It is the text model of a
multimodal model with a nested config; tensors for images are ignored. Mistral Small 3.1 and later have the same wrapper around
a Mistral text model.
"""

from typing import Any

import msgspec

from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import LayerSpec, ModelConfigError, TemperatureConfig
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
    words,
)
from quire.workers.models.spellings import ACTIVATIONS, activation, text_config

OF_IMAGES = words(
    "vision_config image_token_index image_token_id projector_hidden_act vision_feature_layer",
    "multimodal_projector_bias spatial_merge_size",
)
NAMES = CheckpointNames(
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
BETA = "llama_4_scaling_beta"
DEFAULT_ROPE: dict[str, Any] = {  # of Ministral 3
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1,
}  # fmt: skip
KINDS = ("ministral3", "mistral")  # model_type of a nested text_config
STRETCHING = ("yarn", "llama3", "longrope")  # rotations with original positions; absent ones are all positions


def text_fields(fields: Json) -> Json:
    """The text model's fields, of either config; text_config's model_type tells which text model a multimodal one has."""
    if "text_config" in fields:
        fields = text_config(fields, OF_IMAGES)
        if fields.get("model_type") not in KINDS:
            raise ModelConfigError(
                f"config.json: a text_config of model_type {fields.get('model_type')!r:.40} is not supported"
            )
    where, params = rope_parameters(fields)
    inert = ("max_position_embeddings",)  # in parameters: repeats the model's own
    own = {"rms_norm_eps": 1e-5, "sliding_window": None} if _is_ministral(fields) else {}
    params = params or (DEFAULT_ROPE if _is_ministral(fields) else {})
    found = {**own, **fields}
    return found | ({where: {name: value for name, value in params.items() if name not in inert}} if params else {})


def _is_ministral(fields: Json) -> bool:
    return fields.get("model_type") != "mistral"


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
    attention = read_attention(plain, default_kv_heads=8, default_head_dim=128 if _is_ministral(fields) else None)
    attention = msgspec.structs.replace(attention, temperature=read_temperature(fields))
    inner, act = size(fields, "intermediate_size"), activation(fields)
    windows = uniform_windows(fields, "ministral3", sliding_window(fields))
    return tuple(LayerSpec(attention=a, intermediate_size=inner, activation=act) for a in with_windows(attention, windows))


FAMILY = Family(
    "ministral3",
    frozenset(),
    read_layers,
    LlamaBlock,
    plain_fields=text_fields,
    names=NAMES,
    activations=frozenset(ACTIVATIONS),
)
