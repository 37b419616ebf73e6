"""Qwen3 (dense): pre-norm blocks, x += attention(norm(x)); x += mlp(norm(x)), with an RMSNorm on each head of q and k before
the rotation, and optional attention biases. Windows as in Qwen2. The head size is its own field and often not
hidden_size / num_heads.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.blocks import Attend, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, qwen_windows, read_attention, rms_norm_eps, size, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


class Qwen3Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        bias = spec.attention_bias
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, attend, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, bias, act = size(fields, "intermediate_size"), flag(fields, "attention_bias"), activation(fields)
    attention = read_attention(fields, default_kv_heads=32, default_head_dim=128)
    attention = msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields))
    layers = with_windows(attention, qwen_windows(fields))
    return tuple(LayerSpec(attention=a, intermediate_size=inner, attention_bias=bias, activation=act) for a in layers)


FIELDS = frozenset({"use_sliding_window", "max_window_layers", "attention_bias"})

FAMILY = Family("qwen3", FIELDS, read_layers, Qwen3Block, activations=frozenset(ACTIVATIONS))
