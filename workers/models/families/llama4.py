"""Llama 4: pre-norm blocks, x += attention(norm(x)); x += feed_forward(norm(x)). Layers with rotation see their chunk only, and
norm each head of q and k, without weights; the others, every fourth, have full attention, with queries scaled by position.
Every n-th layer has experts in place of the MLP, and a shared expert.

The router's sigmoid multiplies an expert's input, not its output. In transformers the norm of q and k comes after the rotation;
here it comes before, which is equivalent, since a rotation keeps lengths. Absent fields have Llama4TextConfig's defaults.
"""

from typing import Any

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.layers.stacked_experts import Names
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    TemperatureConfig,
)
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size, words
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, read_routing
from quire.workers.models.step_context import StepContext

NAME = "feed_forward"
FIELDS = MOE_FIELDS | words(
    "intermediate_size_mlp moe_layers interleave_moe_layer_step use_qk_norm no_rope_layers no_rope_layer_interval",
    "attention_chunk_size attn_temperature_tuning floor_scale attn_scale attention_bias for_llm_compressor",
)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "num_experts_per_tok": 1, "num_local_experts": 16, "use_qk_norm": True,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True,
}  # fmt: skip
KEEPS_LENGTHS = ("default", "linear", "llama3")  # rotations that do


class Llama4Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias)
        self.post_attention_layernorm = make_norm(*norm)
        self.feed_forward: Module
        if spec.experts is None:
            self.feed_forward = GatedMLP(hidden_size, spec.intermediate_size, place, name=NAME)
        else:
            stacked = {"router": "router", "shared": "shared_expert", "names": Names(are_stacked=True)}
            self.feed_forward = MoE(spec.experts, hidden_size, place, name=NAME, **stacked)  # type: ignore[arg-type]

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.feed_forward(x, residual, self.post_attention_layernorm)


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults."""
    return {**DEFAULTS, **fields}


def read_rotates(fields: Json) -> tuple[bool, ...]:
    """Whether each layer rotates."""
    num_layers, flags = size(fields, "num_hidden_layers"), fields.get("no_rope_layers")
    if not flags:
        every = size(fields, "no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(x not in (0, 1) for x in flags):
        raise ModelConfigError(f"config.json: no_rope_layers must list 0 or 1 for each of {num_layers} layers")
    return tuple(bool(x) for x in flags[:num_layers])


def read_chunks(fields: Json, rotates: tuple[bool, ...]) -> tuple[int, ...]:
    """Each layer's chunk size; 0 for full attention."""
    types, names = fields.get("layer_types"), ("full_attention", "chunked_attention")
    if types is None:
        types = [names[yes] for yes in rotates]
    if not isinstance(types, list) or len(types) != len(rotates) or any(name not in names for name in types):
        raise ModelConfigError(f"config.json: layer_types must list {' or '.join(names)} for each of {len(rotates)} layers")
    if names[1] in types and fields.get("attention_chunk_size") is None:
        raise ModelConfigError("config.json: layer_types has chunked_attention, but attention_chunk_size is not set")
    return tuple(size(fields, "attention_chunk_size") if name == names[1] else 0 for name in types)


def read_sparse(fields: Json) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    num_layers, listed = size(fields, "num_hidden_layers"), fields.get("moe_layers")
    if listed is None:
        step = size(fields, "interleave_moe_layer_step", 1)
        listed = list(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ModelConfigError("config.json: moe_layers must list numbers of layers")
    return tuple(layer in listed for layer in range(num_layers))


def read_temperature(fields: Json) -> TemperatureConfig | None:
    """The temperature, if tuned. attn_temperature_tuning was a number in older configs."""
    tuned = fields.get("attn_temperature_tuning")
    if type(tuned) not in (bool, int):
        raise ModelConfigError(f"config.json: attn_temperature_tuning must be true or false, not {tuned!r:.80}")
    if not tuned:
        return None
    return TemperatureConfig(
        beta=number(fields, "attn_scale", 0.1), original_max_position_embeddings=size(fields, "floor_scale", 8192), first=1
    )


def read_attentions(fields: Json) -> list[AttentionSpec]:
    plain = {name: value for name, value in fields.items() if name != "layer_types"}
    attention, replace = read_attention(plain, theta=500000.0), msgspec.structs.replace
    rope, temperature, rotates = attention.rope, read_temperature(fields), read_rotates(fields)
    assert rope is not None
    has_norm = flag(fields, "use_qk_norm")
    if has_norm and rope.type not in KEEPS_LENGTHS:
        raise ModelConfigError(f"config.json: rope type {rope.type} with use_qk_norm is not supported for llama4 models")
    normed = replace(
        attention,
        rope=replace(rope, interleaved=True),
        qk_norm_eps=rms_norm_eps(fields) if has_norm else None,
        has_qk_weights=False,
    )
    still = replace(attention, rope=None, temperature=temperature)
    return [
        replace(normed if yes else still, window=chunk, is_chunked=chunk > 0)
        for yes, chunk in zip(rotates, read_chunks(fields, rotates), strict=True)
    ]


def read_experts(fields: Json) -> ExpertsSpec:
    inner, routing = size(fields, "intermediate_size"), read_routing(fields, scores="sigmoid", by_logits=True)
    return ExpertsSpec(routing=routing, intermediate_size=inner, shared_size=inner, weighs_input=True)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    """If no layer has experts, as in MobileLLM-R1, the fields of experts may be 0."""
    width, bias, sparse = size(fields, "intermediate_size_mlp"), flag(fields, "attention_bias"), read_sparse(fields)
    experts = read_experts(fields) if any(sparse) else None
    return tuple(
        LayerSpec(attention=a, intermediate_size=width, experts=experts if is_sparse else None, attention_bias=bias)
        for a, is_sparse in zip(read_attentions(fields), sparse, strict=True)
    )


FAMILY = Family("llama4", FIELDS, read_layers, Llama4Block, plain_fields=plain_fields)
