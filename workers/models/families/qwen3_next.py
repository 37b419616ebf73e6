"""Qwen3-Next and Qwen3.5 (also 3.6 and 3.8), with experts or dense. Most layers are a Gated DeltaNet, the others attention with
gates: x += mixer(norm(x)); x += mlp(norm(x)).

`layer_types` says which layer is which, or every full_attention_interval-th has attention. Attention's q_proj has each head's
query before its gate, and the output is multiplied by the sigmoid of the gate. Norms are 1 + w, those of q and k too, but not
the one behind the recurrence. The shared expert is multiplied by the sigmoid of a gate. The two differ in how a DeltaNet's
projections are stored, and in which layers may have an MLP without experts. A drafter reads the layer that predicts a further
token (MTP); in checkpoints of multimodal models the vision tower is ignored.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import (
    NO_ATTENTION,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    ModelSpec,
    MTPSpec,
)
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, rms_norm_eps, size, words
from quire.workers.models.fused import with_gates
from quire.workers.models.gated_delta_net import DeltaNetSpec, DeltaRows, GatedDeltaNet, ProjectionsOf
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, check_only, count, read_routing, sparse_layers
from quire.workers.models.spellings import plain_rotation
from quire.workers.models.step_context import StepContext

LINEAR, FULL = "linear_attention", "full_attention"


class HybridBlock(Module):
    """projections: how the checkpoint stores those of a DeltaNet."""

    _mixer: GatedDeltaNet | SelfAttention

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        place: Placement,
        layer: int,
        *,
        projections: ProjectionsOf = DeltaRows.separate,
    ):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        if isinstance(spec.recurrent, DeltaNetSpec):
            self.linear_attn = GatedDeltaNet(
                spec.recurrent, hidden_size, place, layer, eps=config.rms_norm_eps, projections=projections
            )
        else:
            bias = spec.attention_bias
            self.self_attn = SelfAttention(
                spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, qkv=with_gates, is_gated=True
            )
        self.__dict__["_mixer"] = self.linear_attn if spec.recurrent is not None else self.self_attn  # a child has one name
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp: GatedMLP | MoE = (
            GatedMLP(hidden_size, spec.intermediate_size, place)
            if spec.experts is None
            else MoE(spec.experts, hidden_size, place, shared="shared_expert", shared_gate="shared_expert_gate")
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._mixer(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def layer_types(fields: Json) -> tuple[str, ...]:
    """The kind of each layer, LINEAR or FULL."""
    types, num_layers = fields.get("layer_types"), size(fields, "num_hidden_layers")
    if types is None:
        every = size(fields, "full_attention_interval", 4)
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(name not in (LINEAR, FULL) for name in types):
        raise ModelConfigError(f"config.json: layer_types must list {LINEAR} or {FULL} for each of {num_layers} layers")
    return tuple(types)


def read_delta_net(fields: Json) -> DeltaNetSpec:
    spec = DeltaNetSpec(
        num_key_heads=size(fields, "linear_num_key_heads", 16),
        num_value_heads=size(fields, "linear_num_value_heads", 32),
        key_dim=size(fields, "linear_key_head_dim", 128),
        value_dim=size(fields, "linear_value_head_dim", 128),
        window=size(fields, "linear_conv_kernel_dim", 4),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise ModelConfigError(
            f"config.json: linear_num_value_heads {spec.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {spec.num_key_heads}"
        )
    if spec.window < 2:
        raise ModelConfigError("config.json: linear_conv_kernel_dim must be at least 2")
    return spec


def read_gated_attention(fields: Json, default_kv_heads: int) -> AttentionSpec:
    attention = read_attention(fields, default_kv_heads=default_kv_heads, default_head_dim=256, partial=0.25)
    return msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields), qk_norm_weighs="plus_one")


def hybrid_layers(fields: Json, default_kv_heads: int, experts: list[ExpertsSpec | None]) -> tuple[LayerSpec, ...]:
    """Layers of these experts; None: an MLP."""
    check_only(fields, attn_output_gate=True)
    attention, recurrent = read_gated_attention(fields, default_kv_heads), read_delta_net(fields)
    inner = 0 if all(experts) else size(fields, "intermediate_size", 5632)
    bias = flag(fields, "attention_bias")
    return tuple(
        LayerSpec(
            attention=attention if kind == FULL else NO_ATTENTION,
            recurrent=None if kind == FULL else recurrent,
            intermediate_size=inner,
            experts=mixture,
            attention_bias=bias,
        )
        for kind, mixture in zip(layer_types(fields), experts, strict=True)
    )


def read_experts(fields: Json, is_normalized: bool) -> ExpertsSpec:
    return ExpertsSpec(
        routing=read_routing(fields, is_normalized=is_normalized),
        intermediate_size=size(fields, "moe_intermediate_size", 512),
        shared_size=size(fields, "shared_expert_intermediate_size", 512),
    )


def read_next_layers(fields: Json) -> tuple[LayerSpec, ...]:
    experts = read_experts(fields, flag(fields, "norm_topk_prob", True))
    return hybrid_layers(fields, 2, [experts if is_sparse else None for is_sparse in sparse_layers(fields)])


def read_moe_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, mlp_only_layers=[], norm_topk_prob=True, decoder_sparse_step=1)
    return hybrid_layers(fields, 2, [read_experts(fields, True)] * size(fields, "num_hidden_layers"))


def read_dense_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, mlp_only_layers=[])
    return hybrid_layers(fields, 4, [None] * size(fields, "num_hidden_layers"))


def read_mtp(fields: Json, layers: tuple[LayerSpec, ...]) -> MTPSpec | None:
    """One layer with attention, and with experts if the model has some. Config.json may not say that it is there."""
    attention = next((layer for layer in layers if layer.attention.is_there), None)
    many = count(fields, "mtp_num_hidden_layers", 1)
    if attention is None or not many:
        return None
    mixed = next((layer for layer in layers if layer.experts is not None), attention)
    layer = msgspec.structs.replace(attention, experts=mixed.experts, intermediate_size=mixed.intermediate_size)
    norms = ("mtp.pre_fc_norm_embedding.", "mtp.enorm."), ("mtp.pre_fc_norm_hidden.", "mtp.hnorm.")
    why_not = None
    if many > 1:
        why_not = f"it predicts further tokens by {many} layers one after another (mtp_num_hidden_layers)"
    if flag(fields, "mtp_use_dedicated_embeddings"):
        why_not = "the layer that predicts further tokens has an embedding of its own (mtp_use_dedicated_embeddings)"
    return MTPSpec(layers=(layer,), prefixes=(("model.mtp.", "mtp."), *norms), why_not=why_not)


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=rms_norm_eps(fields), weighs="plus_one"))


FIELDS = words(
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
    "full_attention_interval attn_output_gate attention_bias mamba_ssm_dtype mlp_only_layers",
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
)
EXPERT_FIELDS = MOE_FIELDS | words("moe_intermediate_size shared_expert_intermediate_size norm_topk_prob decoder_sparse_step")
NAMES = CheckpointNames(ignored=("mtp.", "model.mtp.", "visual.", "model.visual."))


def _family(
    name: str, fields: frozenset[str], read: Callable[[Json], tuple[LayerSpec, ...]], projections: ProjectionsOf
) -> Family:
    block = partial(HybridBlock, projections=projections)
    return Family(name, FIELDS | fields, read, block, read_model, plain_rotation, NAMES, read_mtp=read_mtp)


QWEN3_NEXT = _family("qwen3_next", EXPERT_FIELDS, read_next_layers, DeltaRows.by_key_head)
QWEN3_5 = _family("qwen3_5", frozenset(), read_dense_layers, DeltaRows.separate)
QWEN3_5_MOE = _family("qwen3_5_moe", EXPERT_FIELDS, read_moe_layers, DeltaRows.separate)
