"""Decoders whose tokens see both ways: embedders made of generating models (gte-Qwen2, LlamaBidirectionalModel).

The blocks are the decoder's; attention is an encoder's, so nothing is cached. Called where a model's pooling is chosen.
"""

import msgspec

from quire.workers.layers.heads import HeadSpec
from quire.workers.models.config import EncoderSpec, LayerSpec, ModelConfig, ModelConfigError


def two_way(config: ModelConfig, head: HeadSpec | None = None) -> ModelConfig:
    """A decoder's config as an encoder's, with a head of labels or none.

    Raises ModelConfigError for layers that can only look back."""
    odd = {
        "recurrent layers": any(layer.recurrent is not None for layer in config.layers),
        "latent attention": any(layer.latent is not None for layer in config.layers),
        "attention sinks": any(layer.attention.has_sinks for layer in config.layers),
        "windows": any(layer.attention.window for layer in config.layers),
        "layers that share keys and values": any(layer.attention.shares is not None for layer in config.layers),
        "inputs of each layer": config.model.per_layer is not None,
        "transformers' own code": config.transformers_config is not None,
    }
    if found := [what for what, is_so in odd.items() if is_so]:
        raise ModelConfigError(f"config.json: is_causal false is not supported with {' and '.join(found)}")
    return msgspec.structs.replace(
        config,
        layers=tuple(map(_seeing_both_ways, config.layers)),
        names=config.names._replace(
            prefixes=(*config.names.prefixes, ("score.", "head.out.")),
            ignored=(*config.names.ignored, "lm_head.", *(("score.",) if head is None else ())),
            torch_files=True,
        ),
        encoder=EncoderSpec(has_final_norm=True, head=head),
    )


def _seeing_both_ways(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, is_causal=False))
