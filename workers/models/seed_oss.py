"""Seed-OSS: Llama's block, with biases of q, k and v by one field and of the output by another."""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.models.blocks import Attend, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = words("attention_bias attention_out_bias mlp_bias residual_dropout")


class SeedOssBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=spec.attention_bias, o_bias=spec.output_bias
        )
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, has_bias=spec.mlp_bias, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, attend, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


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


FAMILY = Family("seed_oss", FIELDS, read_layers, SeedOssBlock, activations=frozenset(ACTIVATIONS))
