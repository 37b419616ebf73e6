"""GLM-4.5, 4.6 and their Air: pre-norm blocks, x += attention(norm(x)); x += mlp(norm(x)). All but the first have a mixture of
experts in place of the MLP, with a shared expert that every token passes. Half of each head is rotated; with `attention_bias`
q, k and v have biases, and with `use_qk_norm` each head of q and k has an RMSNorm.

The router's scores are sigmoids; a correction is added for the choice only. The chosen scores are normalized and multiplied by
routed_scaling_factor. The layer after the last predicts a second token (MTP): a drafter reads it.
"""

from functools import partial

import msgspec

from quire.workers.models.config import ExpertsSpec, LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, rms_norm_eps, size
from quire.workers.models.moe import MoEBlock
from quire.workers.models.moe_fields import (
    GROUP_FIELDS,
    MOE_FIELDS,
    MTP_FIELDS,
    count,
    mtp_layers,
    read_group_routing,
    read_mtp,
)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner = size(fields, "moe_intermediate_size")
    experts = ExpertsSpec(
        routing=read_group_routing(fields), intermediate_size=inner, shared_size=inner * size(fields, "n_shared_experts", 1)
    )
    attention = read_attention(fields, default_kv_heads=8, partial=0.5)
    if flag(fields, "use_qk_norm"):
        attention = msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields))
    dense = LayerSpec(
        attention=attention,
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
    )
    num_dense, num_layers = count(fields, "first_k_dense_replace", 1), size(fields, "num_hidden_layers")
    sparse = msgspec.structs.replace(dense, experts=experts)
    return tuple(dense if i < num_dense else sparse for i in range(num_layers))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    return {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "num_nextn_predict_layers": 1, **fields}


FIELDS = MOE_FIELDS | GROUP_FIELDS | MTP_FIELDS | {"attention_bias", "use_qk_norm"}
BLOCK = partial(MoEBlock, correction="gate.e_score_correction_bias", shared="shared_experts")
FAMILY = Family("glm4_moe", FIELDS, read_layers, BLOCK, plain_fields=plain_fields, ignored=mtp_layers, read_mtp=read_mtp)
