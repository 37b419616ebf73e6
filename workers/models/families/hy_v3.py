"""Hunyuan 3 (HYV3, tencent/Hy3): Qwen3's blocks (an RMSNorm on each head of q and k) with a mixture of experts in place of the
MLP, and a shared expert that every token passes. The first layer has an MLP, unless mlp_layer_types says otherwise.

The router's scores are sigmoids; a correction is added for the choice only. The chosen scores are normalized and multiplied by
router_scaling_factor. Checkpoints and transformers name the router, the correction and the shared expert differently. Layers
after the last, which predict further tokens (MTP), are ignored.
"""

from functools import partial

import msgspec

from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import ExpertsSpec, LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size
from quire.workers.models.moe import MoEBlock
from quire.workers.models.moe_fields import (
    MOE_FIELDS,
    MTP_FIELDS,
    TYPE_FIELDS,
    check_only,
    mtp_layers,
    read_routing,
    sparse_by_type,
)

NAMES = CheckpointNames(
    inner=(
        (".mlp.router.gate.", ".mlp.gate."),
        (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
        (".mlp.shared_mlp.", ".mlp.shared_experts."),
    )
)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, mlp_bias=False, qk_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True)
    check_only(fields, route_norm=True)
    inner = size(fields, "moe_intermediate_size")
    check_only(fields, expert_hidden_dim=inner)
    scale = number(fields, "router_scaling_factor", 2.826)
    routing = read_routing(fields, scores="sigmoid", is_normalized=True, eps=1e-20, scale=scale)
    experts = ExpertsSpec(routing=routing, intermediate_size=inner, shared_size=inner * size(fields, "num_shared_experts", 1))
    attention = read_attention(fields, default_kv_heads=8, default_head_dim=128, theta=11158840.0)
    dense = LayerSpec(
        attention=msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields)),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
    )
    sparse = msgspec.structs.replace(dense, experts=experts)
    return tuple(sparse if is_sparse else dense for is_sparse in sparse_by_type(fields))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    return {"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, **fields}


# The last line's fields tell how sums are rounded and how products are grouped; eod_token_id repeats a token id.
FIELDS = (
    MOE_FIELDS
    | MTP_FIELDS
    | TYPE_FIELDS
    | {
        "attention_bias",
        "mlp_bias",
        "moe_intermediate_size",
        "expert_hidden_dim",
        "num_shared_experts",
        "router_scaling_factor",
        "qk_norm",
        "route_norm",
        "moe_router_use_sigmoid",
        "moe_router_enable_expert_bias",
        "enable_moe_fp32_combine",
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "use_grouped_mm",
        "eod_token_id",
    }
)
BLOCK = partial(MoEBlock, o_bias=True, correction="e_score_correction_bias", shared="shared_experts")
FAMILY = Family("hy_v3", FIELDS, read_layers, BLOCK, plain_fields=plain_fields, names=NAMES, ignored=mtp_layers)
