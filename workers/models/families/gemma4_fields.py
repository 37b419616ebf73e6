"""Gemma 4's config.json: each layer's heads, window and rotation, and the layer that it reads keys and values from.

Called by gemma4.py. The heads of layers with full attention are in `global_head_dim` and `num_global_key_value_heads` or, as
transformers 5.23 writes them, in `per_layer_config`. Absent fields have Gemma4TextConfig's defaults. Raises ModelConfigError.
"""

from typing import Any

import msgspec

from quire.kernels.elementwise.activation_cpu import Activation
from quire.kernels.experts.experts_reference import SwiGLU
from quire.workers.layers.norm import NormSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models import spellings
from quire.workers.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelConfigError,
    ModelSpec,
    PerLayerSpec,
    RopeConfig,
)
from quire.workers.models.families.gemma2 import softcap
from quire.workers.models.families.gemma3 import rope_of_type
from quire.workers.models.fields import (
    Json,
    flag,
    number,
    read_attention,
    rms_norm_eps,
    size,
    windows_by_type,
    words,
)
from quire.workers.models.moe_fields import count, read_routing
from quire.workers.models.per_layer_inputs import CHILDREN, NAME
from quire.workers.models.spellings import only

ACTIVATIONS = spellings.ACTIVATIONS
FULL, LOCAL = "full_attention", "sliding_attention"
FIELDS = words(
    "attention_bias final_logit_softcapping use_bidirectional_attention vocab_size_per_layer_input",
    "hidden_size_per_layer_input attention_k_eq_v num_kv_shared_layers enable_moe_block use_double_wide_mlp num_experts",
    "top_k_experts moe_intermediate_size global_head_dim num_global_key_value_heads per_layer_config",
)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
}  # fmt: skip
DEFAULT_ROPE: dict[str, Json] = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
NAMES = CheckpointNames(prefixes=tuple((f"model.{child}.", f"model.{NAME}.{child}.") for child in CHILDREN))
ACTS: dict[Activation, SwiGLU] = {"silu": SwiGLU(), "gelu_tanh": SwiGLU(alpha=1.5957691216057308, cubic=0.044715)}  # in experts
OVERRIDES = frozenset({"head_dim", "num_key_value_heads"})  # of per_layer_config


def plain_fields(fields: Json) -> Json:
    """The fields with defaults and each layer's type."""
    found = {**DEFAULTS, **{name: value for name, value in fields.items() if name != "hidden_act"}}
    found["hidden_act"] = found.pop("hidden_activation", None) or "gelu_pytorch_tanh"
    num_layers = size(found, "num_hidden_layers")
    types = found.get("layer_types") or [FULL if (i + 1) % 6 == 0 else LOCAL for i in range(num_layers)]
    if isinstance(types, list) and types:
        types = [*types[:-1], FULL]  # transformers forces this
    return {**found, "layer_types": types}


def read_overrides(fields: Json) -> list[Json]:
    """Each layer's fields that replace the model's head_dim and num_key_value_heads."""
    found, types = fields.get("per_layer_config"), fields["layer_types"]
    if found is None:
        ours: Json = {"head_dim": size(fields, "global_head_dim", 512)}
        if flag(fields, "attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
            ours["num_key_value_heads"] = size(fields, "num_global_key_value_heads")
        return [ours if name == FULL else {} for name in types]
    numbers = {str(i) for i in range(len(types))}
    if not isinstance(found, dict) or not found.keys() <= numbers or not all(isinstance(x, dict) for x in found.values()):
        raise ModelConfigError("config.json: per_layer_config must be an object of objects, by numbers of layers")
    if unknown := sorted({name for x in found.values() for name in x} - OVERRIDES):
        raise ModelConfigError(f"config.json: per_layer_config sets {', '.join(unknown)}: not supported")
    return [found.get(str(i), {}) for i in range(len(types))]


def read_ropes(fields: Json, name: str, head_dim: int) -> RopeConfig:
    """Rotary embedding of layers of type `name`."""
    by_type = fields.get("rope_parameters") or DEFAULT_ROPE
    params = by_type.get(name) if isinstance(by_type, dict) else None
    if not isinstance(params, dict):
        raise ModelConfigError(f"config.json: rope_parameters must have an object {name}")
    if params.get("rope_theta") is None:
        raise ModelConfigError(f"config.json: rope_parameters of {name} lacks rope_theta")
    if params.get("rope_type", params.get("type")) != "proportional":
        return rope_of_type(fields, head_dim, params)
    part = number(params, "partial_rotary_factor", 1.0, "rope_parameters")
    if part > 1.0:
        raise ModelConfigError(f"config.json: rope_parameters sets partial_rotary_factor to {part}: at most 1.0 is supported")
    others = {key: value for key, value in params.items() if key not in ("rope_type", "type", "partial_rotary_factor")}
    rope = rope_of_type(fields, head_dim, others)
    return msgspec.structs.replace(rope, type="proportional", proportion=part)


def read_shares(fields: Json) -> list[int | None]:
    """For each layer, the layer that it reads keys and values from, the last of its type that has some; None: its own."""
    types = fields["layer_types"]
    first = len(types) - count(fields, "num_kv_shared_layers", 0)
    if first < 1 or not set(types) <= set(types[:first]):
        raise ModelConfigError("config.json: num_kv_shared_layers leaves no layer of a type that makes keys and values")
    last = {name: i for i, name in enumerate(types[:first])}
    return [None if i < first else last[name] for i, name in enumerate(types)]


def read_attentions(fields: Json) -> list[AttentionSpec]:
    only(fields, "gemma4", use_bidirectional_attention="vision")  # only image tokens attend both ways
    windows = windows_by_type(fields, size(fields, "sliding_window"))
    assert windows is not None
    plain = {key: value for key, value in fields.items() if key not in ("rope_parameters", "rope_scaling", "layer_types")}
    found = []
    for name, window, own, shares in zip(
        fields["layer_types"], windows, read_overrides(fields), read_shares(fields), strict=True
    ):
        attention = read_attention({**plain, **own})
        found.append(
            msgspec.structs.replace(
                attention,
                window=window,
                scale=1.0,
                rope=read_ropes(fields, name, attention.head_dim),
                qk_norm_eps=rms_norm_eps(fields),
                qk_norm_weighs="wide",
                shares=shares,
            )
        )
    return found


def read_experts(fields: Json, activation: Activation) -> ExpertsSpec | None:
    if not flag(fields, "enable_moe_block"):
        return None
    if activation not in ACTS:
        raise ModelConfigError(f"config.json sets hidden_activation to {fields['hidden_act']!r:.60}: not supported of experts")
    routing = read_routing({**fields, "num_experts_per_tok": size(fields, "top_k_experts")}, is_normalized=True)
    return ExpertsSpec(routing=routing, intermediate_size=size(fields, "moe_intermediate_size"), act=ACTS[activation])


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, bias, activation = size(fields, "intermediate_size"), flag(fields, "attention_bias"), spellings.activation(fields)
    experts, joins = read_experts(fields, activation), flag(fields, "attention_k_eq_v")
    wide = 2 if flag(fields, "use_double_wide_mlp") else 1
    return tuple(
        LayerSpec(
            attention=a,
            intermediate_size=inner if a.shares is None else inner * wide,
            experts=experts,
            attention_bias=bias,
            activation=activation,
            keys_are_values=joins and not a.window and a.shares is None,
        )
        for a in read_attentions(fields)
    )


def read_model(fields: Json) -> ModelSpec:
    own = count(fields, "hidden_size_per_layer_input", 0)
    per_layer = PerLayerSpec(size=own, vocab_size=size(fields, "vocab_size_per_layer_input")) if own else None
    if per_layer is not None and per_layer.vocab_size < size(fields, "vocab_size"):
        raise ModelConfigError("config.json: vocab_size_per_layer_input is less than vocab_size: not supported")
    return ModelSpec(
        norm=NormSpec(eps=rms_norm_eps(fields), weighs="wide"),
        embedding_scale=size(fields, "hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_softcap=softcap(fields, "final_logit_softcapping"),
        per_layer=per_layer,
    )


def shared_tensors(fields: Json) -> tuple[str, ...]:
    """Tensors of keys and values that checkpoints may have for layers that do not use them."""
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    layers = [i for i, shares in enumerate(read_shares(fields)) if shares is not None]
    return tuple(f"model.layers.{i}.self_attn.{part}" for i in layers for part in parts)
