"""config.json of a model that has no family of ours -> ModelConfig, by a recording of what transformers' model does.

Called by families.py. Layers are described as far as kernels and cache need it; what they compute is transformers' own code.
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

NO_LIMIT = 1 << 20  # positions, of a model whose config names no limit


def read_transformers_config(fields: Json, quantization: Quantization | None) -> ModelConfig:
    """ModelConfig of config.json's fields. Raises ModelConfigError with the reason for which the model cannot be run so."""
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
        tie_word_embeddings=False,  # what is tied, the model itself says
        max_position_embeddings=_positions(inner),
        initializer_range=number(fields, "initializer_range", 0.02),
        dtype=read_dtype(fields),
        quantization=quantization,
        transformers_config=text,
        longest=_longest(inner, recording.first_position),
    )


@lru_cache(1)
def recorded(config_json: str) -> Recording:
    """Of the model of a config.json: read once for its config, and once more for its construction."""
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
    """Phi-MoE's long factors are its authors': beyond the original length transformers computes with the short ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_mscale" in rope and isinstance(original := rope.get("original_max_position_embeddings"), int):
        return original
    return _positions(config) - first_position if first_position else None


def _rope_kinds(config: Any) -> set[str]:
    """Types of its rotary embeddings, which may be one for each type of layers."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return set()
    every = (rope, *(value for value in rope.values() if isinstance(value, dict)))
    return {str(parameters.get("rope_type", parameters.get("type"))) for parameters in every}
