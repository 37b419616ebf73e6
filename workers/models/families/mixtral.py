"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP, x += experts(norm(x)); each token gets two experts.

Routing is by a softmax over all experts, and the chosen weights are normalized. Experts' layers are w1 (gate), w3 (up) and w2
(down). A sliding window, if set, applies to every layer.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.layers.stacked_experts import Names
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, read_attention, size, sliding_window, uniform_windows, with_windows
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, read_routing
from quire.workers.models.step_context import StepContext

NAMES = Names("w1", "w3", "w2")
# names of transformers 5, and of checkpoints that llm-compressor quantized expert by expert
CHECKPOINT = CheckpointNames(
    inner=((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
)


class MixtralBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        assert spec.experts is not None
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.block_sparse_moe = MoE(spec.experts, hidden_size, place, name="block_sparse_moe", names=NAMES)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.block_sparse_moe(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner = size(fields, "intermediate_size")
    experts = ExpertsSpec(routing=read_routing(fields, is_normalized=True), intermediate_size=inner)
    windows = uniform_windows(fields, "mixtral", sliding_window(fields))
    layers = with_windows(read_attention(fields, default_kv_heads=8, theta=1e6), windows)
    return tuple(LayerSpec(attention=attention, intermediate_size=inner, experts=experts) for attention in layers)


def plain_fields(fields: Json) -> Json:
    """The fields with those of transformers' defaults that differ from Mistral's."""
    return {"sliding_window": None, "rms_norm_eps": 1e-5, **fields}


FAMILY = Family("mixtral", MOE_FIELDS, read_layers, MixtralBlock, plain_fields=plain_fields, names=CHECKPOINT)
