"""MiMo-V2-Flash: pre-norm blocks, x += attention(norm(x)); x += mlp(norm(x)). Most layers have a mixture of experts in place of
the MLP, without shared ones. Five of six layers have a sliding window, other KV heads, another rotary base, and for each head
a learned logit in its softmax (a sink). Values have fewer elements than keys and are multiplied by attention_value_scale.

The router is DeepSeek V3's. Published configs list the layers with windows in hybrid_layer_pattern and those with experts in
moe_layer_freq; transformers has layer_types and mlp_layer_types. A window of `sliding_window_size` tokens does not count the
token itself, unlike `sliding_window`. Tensors that predict further tokens (MTP) are ignored.
"""

from typing import Any

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError, RopeConfig, ValueHeads
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, read_rope, size, windows_by_type, words
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import (
    GROUP_FIELDS,
    MOE_FIELDS,
    TYPE_FIELDS,
    check_only,
    read_group_routing,
    sparse_by_type,
)
from quire.workers.models.spellings import renamed
from quire.workers.models.step_context import StepContext

FULL, LOCAL = "full_attention", "sliding_attention"
PART = 0.334  # of a head that is rotated, if config.json does not say
NAMES = CheckpointNames(ignored=("model.mtp.",), inner=((".self_attn.attention_sink_bias", ".self_attn.sinks"),))
CORRECTION = "gate.e_score_correction_bias"


class MiMoBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=spec.attention_bias, values=spec.values
        )
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp: Module = (
            GatedMLP(hidden_size, spec.intermediate_size, place)
            if spec.experts is None
            else MoE(spec.experts, hidden_size, place, correction=CORRECTION)
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' names and defaults."""
    check_only(fields, attention_projection_layout="split")
    defaults: dict[str, Any] = {
        "head_dim": 192,
        "v_head_dim": 128,
        "norm_topk_prob": True,
        "attention_value_scale": 0.707,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 4,
    }
    found = renamed(fields, {"layernorm_epsilon": "rms_norm_eps"}, defaults)
    num_layers = size(found, "num_hidden_layers")
    if (window := found.pop("sliding_window_size", None)) is not None:
        found["sliding_window"] = size({"sliding_window_size": window}, "sliding_window_size") + 1
    types = _listed(found, "hybrid_layer_pattern", (FULL, LOCAL))
    experts = _listed(found, "moe_layer_freq", ("dense", "sparse"))
    types = types or [FULL if i == 0 or (i + 1) % 6 == 0 else LOCAL for i in range(num_layers)]
    found["layer_types"] = found.get("layer_types") or types
    found["mlp_layer_types"] = found.get("mlp_layer_types") or experts
    return found


def _listed(fields: Json, name: str, kinds: tuple[str, str]) -> list[str] | None:
    """Each layer's kind by a list of 0 and 1, which is removed from the fields; None without one."""
    numbers = fields.pop(name, None)
    if numbers is None:
        return None
    if not isinstance(numbers, list) or any(type(number) is not int or number not in (0, 1) for number in numbers):
        raise ModelConfigError(f"config.json: {name} must list 0 or 1 for each layer")
    return [kinds[number] for number in numbers]


def read_ropes(fields: Json, head_dim: int) -> dict[str, RopeConfig]:
    """Rotary embedding by layer type. transformers 5 has both in rope_parameters."""
    plain = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    given = fields.get("rope_parameters") or {}
    is_by_type = isinstance(given, dict) and given.keys() <= {FULL, LOCAL}
    if not is_by_type or not all(isinstance(params, dict | None) for params in given.values()):
        raise ModelConfigError(f"config.json: rope_parameters must have {FULL} and {LOCAL}")
    if fields.get("rope_scaling"):
        raise ModelConfigError("config.json sets rope_scaling: not supported for mimo_v2 models")
    thetas = {FULL: number(fields, "rope_theta", 5000000.0), LOCAL: number(fields, "swa_rope_theta", 10000.0)}
    return {
        kind: read_rope(plain, head_dim, params={"rope_theta": theta, **(given.get(kind) or {})}, partial=PART)
        for kind, theta in thetas.items()
    }


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    heads, head_dim, values = (size(fields, name) for name in ("num_attention_heads", "head_dim", "v_head_dim"))
    check_only(fields, scoring_func="sigmoid", topk_method="noaux_tc", n_shared_experts=0)
    check_only(fields, add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True)
    check_only(fields, swa_num_attention_heads=heads, swa_head_dim=head_dim, swa_v_head_dim=values)
    if values > head_dim:
        raise ModelConfigError(f"config.json: v_head_dim {values} is greater than head_dim {head_dim}: not supported")
    windows, ropes = windows_by_type(fields, size(fields, "sliding_window", 129)), read_ropes(fields, head_dim)
    assert windows is not None
    elsewhere = ("rope_parameters", "rope_theta", "partial_rotary_factor", "layer_types")  # read_ropes has read them
    plain = {name: value for name, value in fields.items() if name not in elsewhere}
    of_window = {"num_key_value_heads": size(fields, "swa_num_key_value_heads", 2 * size(fields, "num_key_value_heads"))}
    attentions = {kind: read_attention({**plain, **own}) for kind, own in ((FULL, {}), (LOCAL, of_window))}
    inner = size(fields, "moe_intermediate_size")
    experts = ExpertsSpec(routing=read_group_routing(fields), intermediate_size=inner)
    scale = number(fields, "attention_value_scale", 1.0)
    return tuple(
        LayerSpec(
            attention=msgspec.structs.replace(attentions[kind], window=window, rope=ropes[kind], has_sinks=kind == LOCAL),
            intermediate_size=size(fields, "intermediate_size"),
            experts=experts if is_sparse else None,
            attention_bias=flag(fields, "attention_bias"),
            values=ValueHeads(values, scale),
        )
        for kind, window, is_sparse in zip(fields["layer_types"], windows, sparse_by_type(fields), strict=True)
    )


# attention_chunk_size and hybrid_block_size have no meaning in published models.
FIELDS = (
    MOE_FIELDS
    | GROUP_FIELDS
    | TYPE_FIELDS
    | words(
        "attention_bias v_head_dim attention_value_scale swa_num_attention_heads swa_num_key_value_heads swa_head_dim",
        "swa_v_head_dim swa_rope_theta add_full_attention_sink_bias add_swa_attention_sink_bias attention_chunk_size",
        "hybrid_block_size scoring_func topk_method attention_projection_layout",
    )
)
FAMILY = Family("mimo_v2", FIELDS, read_layers, MiMoBlock, plain_fields=plain_fields, names=NAMES)
