"""config.json of a model without a family of ours -> ModelConfig, by a recording of transformers' model.

Called by family_table.py. Layers are described only as far as kernels and cache need it; transformers' own code computes them.
"""

import json
from functools import lru_cache
from typing import Any

import torch

from quire.ipc.text_config import POSITIONS
from quire.workers.layers.norm import NormSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.quantized.schemes import Quantization
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.fields import Json, number, read_dtype
from quire.workers.models.transformers.attention import spec_of
from quire.workers.models.transformers.recorder import Recording, record
from quire.workers.models.transformers.skeleton import build_skeleton, read_config, text_config

NO_LIMIT = 1 << 20  # positions, if the config has no limit


def read_transformers_config(fields: Json, quantization: Quantization | None) -> ModelConfig:
    """ModelConfig of config.json's fields. Raises ModelConfigError with the reason why the model cannot be run this way."""
    text = json.dumps(fields, sort_keys=True)
    config = read_config(fields)
    inner = text_config(config)
    recording = recorded(text)
    if "longrope" in _rope_kinds(inner) and (own := [call.module for call in recording.attention if call.rope is None]):
        raise ModelConfigError(f"its rotary embedding is longrope, and {own[0]} does not leave it to attention")
    intermediate = getattr(inner, "intermediate_size", None)
    mlp = intermediate if isinstance(intermediate, int) else 4 * recording.hidden_size
    odd = [call.module for call in recording.attention if max(call.qk_dim, call.v_dim) % 2]
    if odd:
        raise ModelConfigError(f"{odd[0]} has heads of an odd size")
    return ModelConfig(
        architecture=_architecture(fields, config),
        vocab_size=recording.vocab_size,
        hidden_size=recording.hidden_size,
        layers=tuple(LayerSpec(attention=spec_of(call), intermediate_size=mlp) for call in recording.attention),
        model=ModelSpec(norm=NormSpec(eps=1e-5)),
        names=CheckpointNames(bare=()),
        tie_word_embeddings=False,  # the model itself has the tied weights
        max_position_embeddings=_positions(inner),
        initializer_range=number(fields, "initializer_range", 0.02),
        dtype=read_dtype(fields),
        quantization=quantization,
        transformers_config=text,
        longest=_longest(inner, recording.first_position),
    )


@lru_cache(1)
def recorded(config_json: str) -> Recording:
    """The recording of a config.json's model. Cached, since it is needed for the config and for the construction."""
    return record(build_skeleton(config_json, torch.float32))


def _architecture(fields: Json, config: Any) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.model_type)


def _positions(config: Any) -> int:
    for name in POSITIONS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT


def _longest(config: Any, first_position: int) -> int | None:
    """The most positions, if limited. Phi-MoE's are the original length: beyond it transformers ignores the long factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_mscale" in rope and isinstance(original := rope.get("original_max_position_embeddings"), int):
        return original
    return _positions(config) - first_position if first_position else None


def _rope_kinds(config: Any) -> set[str]:
    """Types of its rotary embeddings; there may be one for each type of layers."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return set()
    every = (rope, *(value for value in rope.values() if isinstance(value, dict)))
    return {str(parameters.get("rope_type", parameters.get("type"))) for parameters in every}
