"""OLMoE: pre-norm blocks, x += attention(norm(x)); x += experts(norm(x)), with an RMSNorm over all heads of q, and of k, before
the rotation, and optional biases of attention. Routing is by a softmax over all experts, normalized if `norm_topk_prob`.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.blocks import SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, uniform_windows
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, read_routing
from quire.workers.models.qk_norms import over_all_heads
from quire.workers.models.spellings import only
from quire.workers.models.step_context import StepContext


class OlmoeBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        qk_norm, bias = over_all_heads(spec.attention.head_dim, config.rms_norm_eps, "rounded"), spec.attention_bias
        assert spec.experts is not None
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, make_qk_norm=qk_norm
        )
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = MoE(spec.experts, hidden_size, place)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "olmoe", clip_qkv=None)
    inner = size(fields, "intermediate_size")
    routing = read_routing(fields, is_normalized=flag(fields, "norm_topk_prob"))
    layer = LayerSpec(
        attention=read_attention(fields),
        intermediate_size=inner,
        experts=ExpertsSpec(routing=routing, intermediate_size=inner),
        attention_bias=flag(fields, "attention_bias"),
    )
    return (layer,) * len(uniform_windows(fields, "olmoe", 0))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    return {"rms_norm_eps": 1e-5, **fields}


FIELDS = MOE_FIELDS | {"norm_topk_prob", "attention_bias", "clip_qkv"}
FAMILY = Family("olmoe", FIELDS, read_layers, OlmoeBlock, plain_fields=plain_fields)
