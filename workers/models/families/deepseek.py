"""DeepSeek V2 (and V2-Lite), V3 and R1: pre-norm blocks, x += attention(norm(x)); x += mlp(norm(x)), with latent attention, and
from `first_k_dense_replace` on a mixture of experts, with shared ones, in place of the MLP.

Rotated pairs are neighbors; with yarn the scale of q·k includes mscale². V2 routes by a softmax, greedily or among the best
groups, without normalizing. V3 routes by sigmoids plus a correction, which affects the choice but not the weights, among the
groups with the best two experts. Weights are multiplied by routed_scaling_factor. Layers after the last predict further tokens
(MTP): a drafter reads them.
"""

import math

import msgspec
import torch

from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.blocks import GatedMLP
from quire.workers.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LatentSizes,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
)
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_rope, size
from quire.workers.models.mla import LatentAttention
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import (
    GROUP_FIELDS,
    MOE_FIELDS,
    MTP_FIELDS,
    check_only,
    count,
    mtp_layers,
    read_group_routing,
    read_mtp,
    read_routing,
)
from quire.workers.models.step_context import StepContext

CORRECTION = "gate.e_score_correction_bias"
SIZES = frozenset({"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"})
TRAINING = frozenset({"aux_loss_alpha", "seq_aux", "ep_size"})


class DeepseekBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        assert spec.latent is not None
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = LatentAttention(spec.attention, spec.latent, hidden_size, place, layer)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp: Module
        if spec.experts is None:
            self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place)
        else:
            correction = CORRECTION if spec.experts.routing.scores == "sigmoid" else None
            self.mlp = MoE(spec.experts, hidden_size, place, correction=correction, shared="shared_experts")

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def read_sizes(fields: Json) -> LatentSizes:
    q_latent = fields.get("q_lora_rank")
    return LatentSizes(
        nope=size(fields, "qk_nope_head_dim"),
        rotary=size(fields, "qk_rope_head_dim"),
        value=size(fields, "v_head_dim"),
        latent=size(fields, "kv_lora_rank"),
        q_latent=0 if q_latent is None else size(fields, "q_lora_rank"),
    )


def read_attention(fields: Json, sizes: LatentSizes) -> AttentionSpec:
    if sizes.rotary % 2:
        raise ModelConfigError(f"config.json: qk_rope_head_dim {sizes.rotary} is odd: rotary embeddings need an even size")
    rope = read_rope(fields, sizes.rotary)
    interleaved = flag(fields, "rope_interleave", True)
    return AttentionSpec(
        num_heads=size(fields, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=sizes.rotary + sizes.latent,
        latent_dim=sizes.latent,
        scale=(sizes.nope + sizes.rotary) ** -0.5 * mscale(rope) ** 2,
        window=0,
        rope=msgspec.structs.replace(rope, rotary_dim=sizes.rotary, interleaved=interleaved),
    )


def mscale(rope: RopeConfig) -> float:
    """The factor of queries and of keys for longer contexts, besides their rotation."""
    if rope.type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def read_v2_routing(fields: Json) -> Routing:
    scale = number(fields, "routed_scaling_factor", 1.0)
    method = fields.get("topk_method") or "greedy"
    if flag(fields, "norm_topk_prob"):
        raise ModelConfigError("config.json sets norm_topk_prob to true: only false is supported for deepseek_v2 models")
    if method == "greedy":
        return read_routing(fields, scale=scale)
    if method != "group_limited_greedy":
        raise ModelConfigError(f"config.json: topk_method {method!r:.80} is not supported: greedy and group_limited_greedy are")
    return read_routing(fields, scale=scale, num_groups=size(fields, "n_group"), top_groups=size(fields, "topk_group"))


def read_layers(fields: Json, routing: Routing) -> tuple[LayerSpec, ...]:
    sizes, inner = read_sizes(fields), size(fields, "moe_intermediate_size")
    shared = inner * count(fields, "n_shared_experts", 0)
    dense = LayerSpec(
        attention=read_attention(fields, sizes), latent=sizes, intermediate_size=size(fields, "intermediate_size")
    )
    experts = ExpertsSpec(routing=routing, intermediate_size=inner, shared_size=shared)
    sparse, first = msgspec.structs.replace(dense, experts=experts), count(fields, "first_k_dense_replace", 0)
    return tuple(dense if i < first else sparse for i in range(size(fields, "num_hidden_layers")))


def read_v2_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, scoring_func="softmax", moe_layer_freq=1, attention_bias=False, mlp_bias=False)
    return read_layers(fields, read_v2_routing(fields))


def read_v3_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, scoring_func="sigmoid", moe_layer_freq=1, attention_bias=False, topk_method="noaux_tc")
    return read_layers(fields, read_group_routing(fields))


def plain_v2_fields(fields: Json) -> Json:
    """The fields with transformers' defaults; a q_lora_rank of null means no q latent."""
    return {"n_shared_experts": 2, "q_lora_rank": 1536, **fields}


def plain_v3_fields(fields: Json) -> Json:
    defaults = {
        "n_shared_experts": 1, "q_lora_rank": 1536, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return {**defaults, **fields}


FIELDS = MOE_FIELDS | GROUP_FIELDS | MTP_FIELDS | SIZES | TRAINING | {
    "attention_bias", "mlp_bias", "moe_layer_freq", "scoring_func", "topk_method", "rope_interleave",
}  # fmt: skip
DEEPSEEK_V2 = Family("deepseek_v2", FIELDS, read_v2_layers, DeepseekBlock, plain_fields=plain_v2_fields)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    FIELDS,
    read_v3_layers,
    DeepseekBlock,
    plain_fields=plain_v3_fields,
    ignored=mtp_layers,
    read_mtp=read_mtp,
)
