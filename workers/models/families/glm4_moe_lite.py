"""GLM-4.7-Flash: DeepSeek's blocks with latent attention, and DeepSeek V3's router; a shared expert that every token passes.

The first layer has an MLP, unless mlp_layer_types says otherwise. Layers after the last predict further tokens (MTP): a
drafter reads them.
"""

import msgspec

from quire.workers.models.config import ExpertsSpec, LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families import deepseek
from quire.workers.models.fields import Json, size
from quire.workers.models.moe_fields import (
    GROUP_FIELDS,
    MOE_FIELDS,
    MTP_FIELDS,
    TYPE_FIELDS,
    check_only,
    count,
    mtp_layers,
    read_group_routing,
    read_mtp,
    sparse_by_type,
)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, attention_bias=False, topk_method="noaux_tc", scoring_func="sigmoid", partial_rotary_factor=1.0)
    sizes, inner = deepseek.read_sizes(fields), size(fields, "moe_intermediate_size")
    experts = ExpertsSpec(
        routing=read_group_routing(fields), intermediate_size=inner, shared_size=inner * count(fields, "n_shared_experts", 0)
    )
    dense = LayerSpec(
        attention=deepseek.read_attention(fields, sizes),
        latent=sizes,
        intermediate_size=size(fields, "intermediate_size"),
    )
    sparse = msgspec.structs.replace(dense, experts=experts)
    return tuple(sparse if is_sparse else dense for is_sparse in sparse_by_type(fields))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults; a q_lora_rank of null means no q latent."""
    defaults = {
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    }
    return {**defaults, **fields}


FIELDS = (
    MOE_FIELDS
    | GROUP_FIELDS
    | MTP_FIELDS
    | TYPE_FIELDS
    | deepseek.SIZES
    | {
        "attention_bias",
        "topk_method",
        "scoring_func",
        "rope_interleave",
    }
)
BLOCK = deepseek.DeepseekBlock
FAMILY = Family("glm4_moe_lite", FIELDS, read_layers, BLOCK, plain_fields=plain_fields, ignored=mtp_layers, read_mtp=read_mtp)
