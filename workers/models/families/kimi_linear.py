"""Kimi Linear: pre-norm blocks, x += mixer(norm(x)); x += mlp(norm(x)). A mixer is Kimi Delta Attention, or DeepSeek's latent
attention without any rotation; `linear_attn_config` lists the layers of each kind, counted from 1, or `layer_types` has them.

Layers from first_k_dense_replace on have experts, with shared ones, in place of the MLP, and DeepSeek V3's router. Some fields
have names of their own. Layers after the last, which predict further tokens (MTP), are ignored.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.layers.stacked_experts import Names
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP
from quire.workers.models.config import (
    NO_ATTENTION,
    AttentionSpec,
    ExpertsSpec,
    LatentSizes,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
)
from quire.workers.models.decoder import Family
from quire.workers.models.families.deepseek import CORRECTION, SIZES, read_sizes
from quire.workers.models.fields import Json, size, words
from quire.workers.models.kimi_delta import KimiDelta, KimiDeltaSpec
from quire.workers.models.mla import LatentAttention
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import (
    GROUP_FIELDS,
    MOE_FIELDS,
    MTP_FIELDS,
    TYPE_FIELDS,
    check_only,
    count,
    mtp_layers,
    read_group_routing,
    sparse_by_type,
)
from quire.workers.models.spellings import renamed
from quire.workers.models.step_context import StepContext

LINEAR, FULL = "linear_attention", "full_attention"
LINEAR_CONFIG = "linear_attn_config"
NAMES = CheckpointNames(inner=((".block_sparse_moe.", ".mlp."),))
EXPERTS = Names("w1", "w3", "w2")


class KimiLinearBlock(Module):
    self_attn: KimiDelta | LatentAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.input_layernorm = RMSNorm(*norm)
        if isinstance(spec.recurrent, KimiDeltaSpec):
            self.self_attn = KimiDelta(spec.recurrent, hidden_size, place, layer, eps=config.rms_norm_eps)
        else:
            assert spec.latent is not None
            self.self_attn = LatentAttention(spec.attention, spec.latent, hidden_size, place, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp: GatedMLP | MoE = (
            GatedMLP(hidden_size, spec.intermediate_size, place)
            if spec.experts is None
            else MoE(spec.experts, hidden_size, place, names=EXPERTS, correction=CORRECTION, shared="shared_experts")
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def layer_types(fields: Json) -> tuple[str, ...]:
    """The kind of each layer, LINEAR or FULL. Without either field the fifth and every fourth after it are FULL."""
    types, num_layers = fields.get("layer_types"), size(fields, "num_hidden_layers")
    linear = fields[LINEAR_CONFIG]
    if types is None and {"full_attn_layers", "kda_layers"} <= linear.keys():
        return _listed(linear, num_layers)
    if types is None:
        return tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(name not in (LINEAR, FULL) for name in types):
        raise ModelConfigError(f"config.json: layer_types must list {LINEAR} or {FULL} for each of {num_layers} layers")
    return tuple(types)


def _listed(linear: Json, num_layers: int) -> tuple[str, ...]:
    kinds = {"full_attn_layers": FULL, "kda_layers": LINEAR}
    found = [(layer, kind) for name, kind in kinds.items() if isinstance(linear[name], list) for layer in linear[name]]
    if any(type(layer) is not int for layer, _ in found) or sorted(layer for layer, _ in found) != [*range(1, num_layers + 1)]:
        raise ModelConfigError(
            f"config.json: {LINEAR_CONFIG} must list each layer from 1 to {num_layers} once, in full_attn_layers or kda_layers"
        )
    return tuple(kind for _, kind in sorted(found))


def read_delta(fields: Json) -> KimiDeltaSpec:
    linear = fields[LINEAR_CONFIG]
    window = size(linear, "short_conv_kernel_size", size(fields, "linear_conv_kernel_dim", 4))
    if window < 2:
        raise ModelConfigError("config.json: short_conv_kernel_size must be at least 2")
    return KimiDeltaSpec(
        num_heads=size(linear, "num_heads", size(fields, "linear_num_heads", 32)),
        head_dim=size(linear, "head_dim", size(fields, "linear_head_dim", 128)),
        window=window,
    )


def read_attention(fields: Json, sizes: LatentSizes) -> AttentionSpec:
    if sizes.rotary % 2:
        raise ModelConfigError(f"config.json: qk_rope_head_dim {sizes.rotary} is odd: only even sizes are supported")
    return AttentionSpec(
        num_heads=size(fields, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=sizes.rotary + sizes.latent,
        latent_dim=sizes.latent,
        scale=(sizes.nope + sizes.rotary) ** -0.5,
        window=0,
        rope=None,
    )


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, mla_use_nope=True, moe_layer_freq=1, moe_router_activation_func="sigmoid", attention_bias=False)
    sizes, inner = read_sizes(fields), size(fields, "moe_intermediate_size")
    experts = ExpertsSpec(
        routing=read_group_routing(fields), intermediate_size=inner, shared_size=inner * count(fields, "n_shared_experts", 0)
    )
    width = size(fields, "intermediate_size")
    full = LayerSpec(attention=read_attention(fields, sizes), latent=sizes, intermediate_size=width)
    linear = LayerSpec(attention=NO_ATTENTION, recurrent=read_delta(fields), intermediate_size=width)
    return tuple(
        msgspec.structs.replace(full if kind == FULL else linear, experts=experts if is_sparse else None)
        for kind, is_sparse in zip(layer_types(fields), sparse_by_type(fields), strict=True)
    )


RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "n_shared_experts": 1,
    LINEAR_CONFIG: {},
}


def plain_fields(fields: Json) -> Json:
    found = renamed(fields, RENAMED, DEFAULTS)
    linear = found[LINEAR_CONFIG]
    if not isinstance(linear, dict):
        raise ModelConfigError(f"config.json: {LINEAR_CONFIG} must be an object, not {linear!r:.80}")
    if unknown := sorted(linear.keys() - LINEAR_FIELDS):
        raise ModelConfigError(f"config.json: {LINEAR_CONFIG} sets {', '.join(unknown)}: not supported")
    return found


LINEAR_FIELDS = words("full_attn_layers kda_layers head_dim num_heads short_conv_kernel_size")
FIELDS = (
    MOE_FIELDS
    | GROUP_FIELDS
    | MTP_FIELDS
    | SIZES
    | TYPE_FIELDS
    | words(
        "linear_attn_config linear_head_dim linear_num_heads linear_conv_kernel_dim mla_use_nope moe_layer_freq",
        "moe_router_activation_func use_grouped_topk attention_bias",
    )
)
FAMILY = Family("kimi_linear", FIELDS, read_layers, KimiLinearBlock, plain_fields=plain_fields, names=NAMES, ignored=mtp_layers)
