"""Qwen3-MoE: Qwen3's blocks (an RMSNorm on each head of q and k); most layers have a mixture of experts in place of the MLP, x
+= experts(norm(x)). There is no shared expert.

Routing is by a softmax over all experts, normalized if `norm_topk_prob`, which all published checkpoints set.
`decoder_sparse_step` and `mlp_only_layers` tell which layers have an MLP. A sliding window, if set, applies to every layer.
"""

from functools import partial

import msgspec

from quire.workers.layers.stacked_experts import Names
from quire.workers.models.config import ExpertsSpec, LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import (
    Json,
    flag,
    read_attention,
    rms_norm_eps,
    size,
    sliding_window,
    uniform_windows,
    with_windows,
)
from quire.workers.models.moe import MoEBlock
from quire.workers.models.moe_fields import MOE_FIELDS, check_only, read_routing, sparse_layers


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True)  # Qwen3-Coder sets these
    routing = read_routing(fields, is_normalized=flag(fields, "norm_topk_prob"))
    experts = ExpertsSpec(routing=routing, intermediate_size=size(fields, "moe_intermediate_size"))
    inner, bias = size(fields, "intermediate_size"), flag(fields, "attention_bias")
    attention = msgspec.structs.replace(read_attention(fields, default_kv_heads=4), qk_norm_eps=rms_norm_eps(fields))
    window = sliding_window(fields) if flag(fields, "use_sliding_window") else 0
    return tuple(
        LayerSpec(attention=a, intermediate_size=inner, experts=experts if is_sparse else None, attention_bias=bias)
        for a, is_sparse in zip(
            with_windows(attention, uniform_windows(fields, "qwen3_moe", window)), sparse_layers(fields), strict=True
        )
    )


FIELDS = MOE_FIELDS | {
    "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "use_sliding_window",
    "max_window_layers", "attention_bias", "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm",
}  # fmt: skip
BLOCK = partial(MoEBlock, o_bias=True)
FAMILY = Family("qwen3_moe", FIELDS, read_layers, BLOCK)
# the text model of Qwen3-VL, whose checkpoints have all experts of a layer in one tensor
STACKED = Family("qwen3_vl_moe", FIELDS, read_layers, partial(BLOCK, names=Names(are_stacked=True)))
