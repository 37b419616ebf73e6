"""GLM-4: half of each head is rotated, neighboring elements as pairs; q, k and v have biases; gate and up are one tensor.
Versions before 0414 (`glm`) have Llama's block, later ones (`glm4`) sandwich norms, x += norm(attention(norm(x))); x +=
norm(mlp(norm(x))).
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, size, uniform_windows
from quire.workers.models.fused import stacked_pair
from quire.workers.models.spellings import ACTIVATIONS, activation
from quire.workers.models.step_context import StepContext

FIELDS = frozenset({"attention_bias"})


class GlmBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=spec.attention_bias)
        self.post_attention_layernorm = make_norm(*norm)
        gate_up = stacked_pair("gate_up_proj")
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation, gate_up=gate_up)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


class Glm4Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias, act, inner = spec.attention_bias, spec.activation, spec.intermediate_size
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, feeds_add_norm=False)
        self.post_self_attn_layernorm = make_norm(*norm)
        self.post_attention_layernorm = make_norm(*norm)
        gate_up = stacked_pair("gate_up_proj")
        self.mlp = GatedMLP(hidden_size, inner, place, activation=act, gate_up=gate_up, feeds_add_norm=False)
        self.post_mlp_layernorm = make_norm(*norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        x = self.post_self_attn_layernorm(x)
        x, residual = self.mlp(x, residual, self.post_attention_layernorm)
        return self.post_mlp_layernorm(x), residual


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    attention = read_attention(fields, default_kv_heads=2, default_head_dim=128, partial=0.5)
    assert attention.rope is not None
    rope = msgspec.structs.replace(attention.rope, interleaved=True)
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, rope=rope),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias", True),
        activation=activation(fields),
    )
    return (layer,) * len(uniform_windows(fields, "glm", 0))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=number(fields, "rms_norm_eps", 1.5625e-7)))


GLM = Family("glm", FIELDS, read_layers, GlmBlock, read_model, activations=frozenset(ACTIVATIONS))
GLM4 = Family("glm4", FIELDS, read_layers, Glm4Block, read_model, activations=frozenset(ACTIVATIONS))
