"""Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP, x += attention(h) + mlp(h) with h = norm(x), a LayerNorm with bias;
biases everywhere, also in the LM head; the first elements of each head are rotated; the MLP is ungated.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import MLP, Names, SelfAttention, parallel_residual
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, number, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation, only
from quire.workers.models.step_context import StepContext

FIELDS = words("layer_norm_eps qk_layernorm")
NAMES = CheckpointNames(prefixes=(("model.final_layernorm.", "model.norm."),))


class PhiBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, inner = config.hidden_size, spec.intermediate_size
        self.input_layernorm = make_norm(config.model.norm, hidden_size, place.dtype, place.device)
        self.self_attn = SelfAttention(
            spec.attention,
            hidden_size,
            place,
            layer,
            qkv_bias=True,
            o_bias=True,
            names=Names(o_proj="dense"),
            feeds_add_norm=False,
        )
        self.mlp = MLP(hidden_size, inner, place, "fc1", "fc2", activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return parallel_residual(self.self_attn, self.mlp, self.input_layernorm, None, x, residual, context, logits_indices)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "phi", qk_layernorm=False)
    layer = LayerSpec(
        attention=read_attention(fields, partial=0.5),
        intermediate_size=size(fields, "intermediate_size"),
        activation=activation(fields, "gelu_new"),
        is_parallel=True,
        has_mlp_norm=False,
    )
    return (layer,) * len(uniform_windows(fields, "phi", 0))


def read_model(fields: Json) -> ModelSpec:
    norm = NormSpec(type="layer", has_bias=True, eps=number(fields, "layer_norm_eps", 1e-5))
    return ModelSpec(norm=norm, head_bias=True)


FAMILY = Family("phi", FIELDS, read_layers, PhiBlock, read_model, names=NAMES, activations=frozenset(ACTIVATIONS))
