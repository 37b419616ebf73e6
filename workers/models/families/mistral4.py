"""Mistral 4: DeepSeek's blocks with latent attention, yarn, and queries scaled by position beyond the original length; experts,
with shared ones, from `first_k_dense_replace` on.

Routing is by a softmax, among the groups with the best two experts; weights are normalized and multiplied by
routed_scaling_factor. Published checkpoints have it within a multimodal model (wrappers.py).
"""

from typing import Any

import msgspec

from quire.kernels.experts.routing_reference import Routing
from quire.workers.models.config import LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families import deepseek
from quire.workers.models.families.ministral3 import BETA, read_temperature
from quire.workers.models.fields import Json, flag, number, rope_parameters, size
from quire.workers.models.moe_fields import GROUP_FIELDS, MOE_FIELDS, MTP_FIELDS, check_only, mtp_layers, read_routing

FIELDS = MOE_FIELDS | GROUP_FIELDS | MTP_FIELDS | deepseek.SIZES | {"attention_bias", "rope_interleave"}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 32, "n_shared_experts": 1, "n_routed_experts": 128, "kv_lora_rank": 256,
    "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64, "num_experts_per_tok": 4,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "max_position_embeddings": 1048576,
}  # fmt: skip
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1,
}  # fmt: skip
INERT = ("max_position_embeddings",)  # in parameters: repeats the model's own


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    counted = {} if fields.get("num_local_experts") is None else {"n_routed_experts": fields["num_local_experts"]}
    found = {**DEFAULTS, **counted, **fields}
    where, params = rope_parameters(found)
    params = {name: value for name, value in (params or DEFAULT_ROPE).items() if name not in INERT}
    _check_rotary(found, params)
    return {name: value for name, value in found.items() if name != "partial_rotary_factor"} | {where: params}


def _check_rotary(fields: Json, params: Json) -> None:
    """partial_rotary_factor must agree with the sizes, and is removed."""
    sizes = deepseek.read_sizes(fields)
    part = sizes.rotary / (sizes.rotary + sizes.nope)
    for source in (fields, params):
        check_only(source, partial_rotary_factor=part)
    params.pop("partial_rotary_factor", None)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, attention_bias=False)
    where, params = rope_parameters(fields)
    plain = {**fields, where: {name: value for name, value in params.items() if name != BETA}}
    layers = deepseek.read_layers(plain, read_softmax_routing(fields))
    temperature, replace = read_temperature(fields), msgspec.structs.replace
    return tuple(replace(layer, attention=replace(layer.attention, temperature=temperature)) for layer in layers)


def read_softmax_routing(fields: Json) -> Routing:
    return read_routing(
        fields,
        is_normalized=flag(fields, "norm_topk_prob"),
        eps=1e-20,
        scale=number(fields, "routed_scaling_factor", 1.0),
        num_groups=size(fields, "n_group", 1),
        top_groups=size(fields, "topk_group", 1),
        group_top=2,
    )


FAMILY = Family("mistral4", FIELDS, read_layers, deepseek.DeepseekBlock, plain_fields=plain_fields, ignored=mtp_layers)
