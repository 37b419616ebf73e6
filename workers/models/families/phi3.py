"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's block with q, k and v in one tensor of the checkpoint, and gate and up in
another. Long-context models have longrope (`su` and `yarn` in old configs), for which rope.py chooses factors by the length
served. Phi-4-mini rotates three quarters of each head, and ties its LM head.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, read_attention, size, sliding_window, uniform_windows, with_windows, words
from quire.workers.models.fused import stacked, stacked_pair
from quire.workers.models.spellings import ACTIVATIONS, activation, only
from quire.workers.models.step_context import StepContext

FIELDS = words("attention_bias full_attn_mod interpolate_factor lm_head_bias mlp_bias embd_layer")


class Phi3Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv=stacked("qkv_proj"))
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(
            hidden_size, spec.intermediate_size, place, activation=spec.activation, gate_up=stacked_pair("gate_up_proj")
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def plain_fields(fields: Json) -> Json:
    """As in transformers, `su` and `yarn` mean longrope, and an absent sliding_window means none."""
    found = {"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **fields}
    for name in ("rope_scaling", "rope_parameters"):
        params = found.get(name)
        if isinstance(params, dict):
            kinds = [key for key in ("rope_type", "type") if params.get(key) in ("su", "yarn")]
            found[name] = {**params, **dict.fromkeys(kinds, "longrope")}
    return found


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "phi3", attention_bias=False, lm_head_bias=False, mlp_bias=False, full_attn_mod=1, interpolate_factor=1)
    attention = read_attention(fields, partial=1.0)
    inner, windows = size(fields, "intermediate_size"), uniform_windows(fields, "phi3", sliding_window(fields))
    act, layers = activation(fields), with_windows(attention, windows)
    return tuple(LayerSpec(attention=a, intermediate_size=inner, activation=act) for a in layers)


FAMILY = Family("phi3", FIELDS, read_layers, Phi3Block, plain_fields=plain_fields, activations=frozenset(ACTIVATIONS))
