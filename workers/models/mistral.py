"""Mistral: pre-norm blocks without biases, x += attention(norm(x)); x += mlp(norm(x)). All layers see the last
`sliding_window` tokens (Mistral 7B v0.1), or everything (later ones).
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.blocks import Attend, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, read_attention, size, sliding_window, uniform_windows, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


class MistralBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, attend, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, act = size(fields, "intermediate_size"), activation(fields)
    windows = uniform_windows(fields, "mistral", sliding_window(fields))
    layers = with_windows(read_attention(fields, default_kv_heads=8), windows)
    return tuple(LayerSpec(attention=attention, intermediate_size=inner, activation=act) for attention in layers)


FAMILY = Family("mistral", frozenset(), read_layers, MistralBlock, activations=frozenset(ACTIVATIONS))
