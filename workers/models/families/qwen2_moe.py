"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's blocks; most layers have a mixture of experts in place of the MLP, and a shared expert,
times the sigmoid of a gate: x += experts(h) + σ(g·h) shared(h), h = norm(x).

Routing is by a softmax over all experts, normalized if `norm_topk_prob`. `decoder_sparse_step` and `mlp_only_layers` tell which
layers have an MLP. With `use_sliding_window` every other layer below `max_window_layers`, from the first on, has a sliding
window; in Qwen2 the layers above have one.
"""

from functools import partial

from quire.workers.models.config import ExpertsSpec, LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, sliding_window, windows_by_type, with_windows
from quire.workers.models.moe import MoEBlock
from quire.workers.models.moe_fields import MOE_FIELDS, count, read_routing, sparse_layers


def windows(fields: Json) -> tuple[int, ...]:
    """Each layer's window, 0 for none. `layer_types`, if present, takes precedence."""
    window = sliding_window(fields) if flag(fields, "use_sliding_window") else 0
    below = count(fields, "max_window_layers", 28)
    by_type = windows_by_type(fields, window)
    return by_type or tuple(window if i % 2 == 0 and i < below else 0 for i in range(size(fields, "num_hidden_layers")))


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    experts = ExpertsSpec(
        routing=read_routing(fields, is_normalized=flag(fields, "norm_topk_prob")),
        intermediate_size=size(fields, "moe_intermediate_size"),
        shared_size=size(fields, "shared_expert_intermediate_size", 5632),
    )
    inner, bias = size(fields, "intermediate_size"), flag(fields, "qkv_bias", True)
    attention = with_windows(read_attention(fields, default_kv_heads=16), windows(fields))
    return tuple(
        LayerSpec(attention=a, intermediate_size=inner, experts=experts if is_sparse else None, attention_bias=bias)
        for a, is_sparse in zip(attention, sparse_layers(fields), strict=True)
    )


FIELDS = MOE_FIELDS | {
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    "use_sliding_window", "max_window_layers", "qkv_bias",
}  # fmt: skip
BLOCK = partial(MoEBlock, shared="shared_expert", shared_gate="shared_expert_gate")
FAMILY = Family("qwen2_moe", FIELDS, read_layers, BLOCK)
