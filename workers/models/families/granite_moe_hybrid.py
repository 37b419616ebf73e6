"""Granite 4: Granite 3's block and its four multipliers, x += r mixer(norm(x)); x += r mlp(norm(x)). The mixer is Mamba 2 or
attention, by `layer_types`.

Attention rotates only if position_embedding_type is rope. The MLP is a shared one that every token passes, beside experts if
num_local_experts is not 0; the softmax is over the chosen experts. gate and up are one tensor, as are all experts'.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import NO_ATTENTION, ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.families.granite import FIELDS as GRANITE_FIELDS
from quire.workers.models.families.granite import read_model
from quire.workers.models.fields import Json, flag, number, read_attention, size, words
from quire.workers.models.fused import stacked_pair
from quire.workers.models.mamba2 import Mamba2, MambaSpec
from quire.workers.models.mamba_fields import ATTENTION, BAMBA_FIELDS, mixers, read_mamba
from quire.workers.models.moe import MoE, SharedExpert
from quire.workers.models.moe_fields import count, read_routing
from quire.workers.models.step_context import StepContext

GATE_UP = stacked_pair("input_linear")


class GraniteHybridBlock(Module):
    _mixer: Mamba2 | SelfAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        if isinstance(spec.recurrent, MambaSpec):
            self.mamba = Mamba2(spec.recurrent, hidden_size, place, layer, eps=config.rms_norm_eps)
        else:
            bias = spec.attention_bias
            self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias)
        self.__dict__["_mixer"] = self.mamba if spec.recurrent is not None else self.self_attn  # a child has one name
        self.post_attention_layernorm = make_norm(*norm)
        self.shared_mlp: GatedMLP | SharedExpert
        if spec.experts is None:
            self.shared_mlp = GatedMLP(hidden_size, spec.intermediate_size, place, name="shared_mlp", gate_up=GATE_UP)
        else:
            shared = place.at("shared_mlp")
            self.shared_mlp = SharedExpert(hidden_size, spec.experts.shared_size, shared, gate_up=GATE_UP)
            self.block_sparse_moe = MoE(spec.experts, hidden_size, place, name="block_sparse_moe", router="router")

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._mixer(x, residual, self.input_layernorm, context, logits_indices)
        if isinstance(self.shared_mlp, GatedMLP):
            return self.shared_mlp(x, residual, self.post_attention_layernorm)
        h = self.post_attention_layernorm.add(x, residual)
        return self.block_sparse_moe.of(h, self.shared_mlp(h)), residual


def read_experts(fields: Json) -> ExpertsSpec | None:
    if not count(fields, "num_local_experts", 8):
        return None
    return ExpertsSpec(
        routing=read_routing({"num_experts_per_tok": 2, **fields}, is_normalized=True),
        intermediate_size=size(fields, "intermediate_size"),
        shared_size=size(fields, "shared_intermediate_size", 1024),
    )


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    types, replace = mixers(fields, "layer_types"), msgspec.structs.replace
    experts, rotates = read_experts(fields), fields.get("position_embedding_type")
    if rotates not in (None, "nope", "rope"):
        raise ModelConfigError(f"config.json: position_embedding_type {rotates!r:.80} is not supported: rope and nope are")
    mamba = LayerSpec(
        attention=NO_ATTENTION,
        recurrent=read_mamba(fields),
        intermediate_size=0 if experts else size(fields, "shared_intermediate_size", 1024),
        experts=experts,
        attention_bias=flag(fields, "attention_bias"),
    )
    attention = replace(read_attention(fields), scale=number(fields, "attention_multiplier", 1.0))
    attention = attention if rotates == "rope" else replace(attention, rope=None)
    full = replace(mamba, recurrent=None, attention=attention)
    return tuple(full if kind == ATTENTION else mamba for kind in types)


FIELDS = (
    (GRANITE_FIELDS - {"mlp_bias"})
    | BAMBA_FIELDS
    | words(
        "num_local_experts num_experts num_experts_per_tok shared_intermediate_size position_embedding_type layers_block_type",
        "normalization_function init_method",
    )
)
NAMES = CheckpointNames(
    inner=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.", "block_sparse_moe.router."),
        ("shared_mlp.output_linear.", "shared_mlp.down_proj."),
    )
)
FAMILY = Family("granitemoehybrid", FIELDS, read_layers, GraniteHybridBlock, read_model, names=NAMES)
