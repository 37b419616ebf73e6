"""gpt-oss: pre-norm blocks, x += attention(norm(x)); x += experts(norm(x)), with biases everywhere, also in experts and router.

Every other layer, from the first on, sees the last 128 tokens, and each head has an additional learned logit in its softmax (a
sink). The router's softmax is over the chosen experts only. An expert's gate and up are interleaved, clamped, and combined as
gate · sigmoid(1.702 gate) · (up + 1). Published experts are mxfp4, all of a layer in one tensor. yarn's ramp is not rounded to
whole dimensions.
"""

import msgspec
import torch

from quire.kernels.experts.experts_reference import SwiGLU
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.layers.stacked_experts import Names
from quire.workers.models.blocks import SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import (
    Json,
    flag,
    number,
    read_attention,
    rms_norm_eps,
    size,
    sliding_window,
    windows_by_type,
    with_windows,
)
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, read_routing
from quire.workers.models.step_context import StepContext

NAMES = Names(are_stacked=True, are_interleaved=True)
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOssBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        norm = (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        assert spec.experts is not None
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, config.hidden_size, place, layer, qkv_bias=bias, o_bias=bias)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = MoE(spec.experts, config.hidden_size, place, router="router", names=NAMES, has_bias=True)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, bias = size(fields, "intermediate_size"), flag(fields, "attention_bias", True)
    act = SwiGLU(limit=number(fields, "swiglu_limit", 7.0), alpha=number(fields, "swiglu_alpha", 1.702), offset=1.0)
    experts = ExpertsSpec(routing=read_routing(fields, is_normalized=True), intermediate_size=inner, act=act)
    window = sliding_window(fields)
    windows = windows_by_type(fields, window)
    if windows is None:
        windows = tuple(window if i % 2 == 0 else 0 for i in range(size(fields, "num_hidden_layers")))
    attention = msgspec.structs.replace(read_attention(fields, default_kv_heads=8), has_sinks=True)
    return tuple(
        LayerSpec(attention=a, intermediate_size=inner, experts=experts, attention_bias=bias)
        for a in with_windows(attention, windows)
    )


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=rms_norm_eps(fields), weighs="wide"))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults. `experts_per_token` and `initial_context_length` repeat other fields."""
    found = {"head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, **fields}
    per_token = found.pop("experts_per_token", None)
    if per_token not in (None, found.get("num_experts_per_tok")):
        raise ModelConfigError(f"config.json: experts_per_token {per_token} and num_experts_per_tok differ")
    found.pop("initial_context_length", None)
    if not found.get("rope_scaling") and found.get("rope_parameters") is None:
        found["rope_scaling"] = YARN
    return found


FIELDS = MOE_FIELDS | {"attention_bias", "swiglu_limit", "swiglu_alpha"}
FAMILY = Family("gpt_oss", FIELDS, read_layers, GptOssBlock, read_model, plain_fields)
