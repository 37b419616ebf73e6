"""MiniMax-M2: pre-norm blocks, x += attention(norm(x)); x += experts(norm(x)), with an RMSNorm over all heads of q, and of k,
before the rotation of `rotary_dim` elements of a head. No biases, no shared expert.

The router's scores are sigmoids; a correction is added for the choice only, and the chosen scores are normalized. Experts'
layers are w1 (gate), w3 (up) and w2 (down). Layers after the last, which predict further tokens (MTP), are ignored.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.layers.stacked_experts import Names
from quire.workers.models.blocks import SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig
from quire.workers.models.decoder import Family
from quire.workers.models.families.mixtral import CHECKPOINT
from quire.workers.models.fields import Json, read_attention, size
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, check_only, read_routing
from quire.workers.models.qk_norms import over_all_heads
from quire.workers.models.step_context import StepContext

NAMES = Names("w1", "w3", "w2")
MTP = frozenset({"use_mtp", "num_mtp_modules", "mtp_transformer_layers", "num_mtp_layers"})
# left over from its predecessor, where they had a meaning
INERT = frozenset({
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "shared_moe_mode",
})  # fmt: skip


class MiniMaxM2Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        qk_norm = over_all_heads(spec.attention.head_dim, config.rms_norm_eps, "rounded")
        assert spec.experts is not None
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, make_qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.block_sparse_moe = MoE(
            spec.experts, hidden_size, place, name="block_sparse_moe", names=NAMES, correction="e_score_correction_bias"
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.block_sparse_moe(x, residual, self.post_attention_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, scoring_func="sigmoid", qk_norm_type="per_layer", use_qk_norm=True, use_routing_bias=True)
    check_only(fields, shared_intermediate_size=0, sliding_window=0)
    num_layers, inner = size(fields, "num_hidden_layers"), size(fields, "intermediate_size")
    check_only(fields, attn_type_list=[1] * num_layers, layer_types=["full_attention"] * num_layers)
    routing = read_routing(fields, scores="sigmoid", is_normalized=True)
    experts = ExpertsSpec(routing=routing, intermediate_size=inner)
    attention = read_attention(fields, default_kv_heads=8, partial=1.0)
    layer = LayerSpec(attention=attention, intermediate_size=inner, experts=experts)
    return (layer,) * num_layers


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults, and with `rotary_dim` as partial_rotary_factor."""
    found = {"head_dim": 128, "rope_theta": 5000000.0, **fields}
    rotary = found.pop("rotary_dim", None)
    if rotary is not None:
        found.setdefault("partial_rotary_factor", size(fields, "rotary_dim") / size(found, "head_dim"))
    return found


FIELDS = MOE_FIELDS | MTP | INERT | {
    "scoring_func", "qk_norm_type", "use_qk_norm", "use_routing_bias", "shared_intermediate_size", "attn_type_list",
    "partial_rotary_factor",
}  # fmt: skip
FAMILY = Family(
    "minimax_m2",
    FIELDS,
    read_layers,
    MiniMaxM2Block,
    plain_fields=plain_fields,
    names=CHECKPOINT,
    ignored=lambda fields: ("model.mtp.",),
)
