"""EmbeddingGemma: Gemma 3's layers whose tokens see both ways, the local ones half of the window to each side."""

import msgspec

from quire.workers.layers.heads import HeadSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec, LayerSpec
from quire.workers.models.encoders.family import EncoderFamily
from quire.workers.models.families import gemma3
from quire.workers.models.families.gemma2 import GemmaBlock, gemma_model, plain_fields
from quire.workers.models.fields import Json, flag


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    """Two-way if use_bidirectional_attention is set; a model of this name without it is causal, as its decoder."""
    is_causal, replace = not flag(fields, "use_bidirectional_attention"), msgspec.structs.replace
    layers = gemma3.read_layers({**fields, "use_bidirectional_attention": None})
    if is_causal:
        return layers

    def two_way(layer: LayerSpec) -> LayerSpec:
        window = layer.attention.window and layer.attention.window // 2 + 1
        return replace(layer, attention=replace(layer.attention, is_causal=False, window=window))

    return tuple(map(two_way, layers))


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return EncoderSpec(has_final_norm=True, head=head)


def read_names(fields: Json, kind: str) -> CheckpointNames:
    return CheckpointNames(ignored=("lm_head.",))


FAMILY = EncoderFamily(
    "gemma3",
    gemma3.FIELDS,
    read_layers,
    GemmaBlock,
    gemma_model,
    read_encoder,
    lambda fields, kind: None,
    read_names,
    plain_fields,
)
