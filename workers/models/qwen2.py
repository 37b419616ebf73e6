"""Qwen2 and Qwen2.5: pre-norm blocks, x += attention(norm(x)); x += mlp(norm(x)), with biases of q, k and v, and none of o.
With `use_sliding_window`, layers from `max_window_layers` on see a window and those before see everything: two KV groups.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.blocks import Attend, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, qwen_windows, read_attention, size, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


class Qwen2Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=spec.attention_bias)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, attend, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, act = size(fields, "intermediate_size"), activation(fields)
    layers = with_windows(read_attention(fields, default_kv_heads=32), qwen_windows(fields))
    return tuple(LayerSpec(attention=a, intermediate_size=inner, attention_bias=True, activation=act) for a in layers)


FIELDS = frozenset({"use_sliding_window", "max_window_layers"})

FAMILY = Family("qwen2", FIELDS, read_layers, Qwen2Block, activations=frozenset(ACTIVATIONS))
