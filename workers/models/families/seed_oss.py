"""Seed-OSS: Llama's block, with one field for biases of q, k and v, and another for that of the output projection."""

from quire.workers.models.config import LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, flag, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = words("attention_bias attention_out_bias mlp_bias residual_dropout")


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    layer = LayerSpec(
        attention=read_attention(fields, default_kv_heads=8, default_head_dim=128),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias", True),
        output_bias=flag(fields, "attention_out_bias"),
        mlp_bias=flag(fields, "mlp_bias"),
        activation=activation(fields),
    )
    return (layer,) * len(uniform_windows(fields, "seed_oss", 0))


FAMILY = Family("seed_oss", FIELDS, read_layers, LlamaBlock, activations=frozenset(ACTIVATIONS))
