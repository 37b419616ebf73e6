"""Granite 3: Llama's block and four multipliers: of the embedding, of attention scores, of each sublayer's output before it is
added to the residual, and (a divisor) of the logits.
"""

import msgspec

from quire.workers.layers.norm import NormSpec
from quire.workers.models.config import LayerSpec, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = words(
    "attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier attention_multiplier",
)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    attention = read_attention(fields)
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, scale=number(fields, "attention_multiplier", 1.0)),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        mlp_bias=flag(fields, "mlp_bias"),
        activation=activation(fields),
    )
    return (layer,) * len(uniform_windows(fields, "granite", 0))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(
        norm=NormSpec(eps=rms_norm_eps(fields), residual_scale=number(fields, "residual_multiplier", 1.0)),
        embedding_scale=number(fields, "embedding_multiplier", 1.0),
        logit_scale=1.0 / number(fields, "logits_scaling", 1.0),
    )


FAMILY = Family("granite", FIELDS, read_layers, LlamaBlock, read_model, activations=frozenset(ACTIVATIONS))
