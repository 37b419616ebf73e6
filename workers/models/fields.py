"""Readers of config.json's fields, which the families call: sizes, flags, windows, rotary embedding, dtype.

The spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`, `layer_types`)
are read alike. An absent field has transformers' default; if that differs by family, the family passes it. Every field is used,
known to be irrelevant (`IRRELEVANT`), or refused by name: a model that would run wrong does not run. All functions raise
ModelConfigError. Plain JSON: no transformers, no torch.
"""

import json
from typing import Any

import msgspec

from quire.workers.models.config import AttentionSpec, ModelConfigError, RopeConfig, RopeType

Json = dict[str, Any]


def words(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Fields that do not change what a served model computes.
IRRELEVANT = words(
    # provenance and bookkeeping
    "_name_or_path name_or_path model_type transformers_version _commit_hash auto_map finetuning_task task_specific_params",
    "problem_type id2label label2id num_labels custom_pipelines unsloth_version unsloth_fixed is_llama_config",
    "transformers.js_config is_composition",
    # training only
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout gradient_checkpointing pruned_heads",
    "pretraining_tp router_aux_loss_coef router_jitter_noise output_router_logits loss_type neftune_noise_alpha",
    # how transformers runs it, not what it computes
    "use_cache output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript",
    "use_bfloat16 tf_legacy_loss chunk_size_feed_forward _attn_implementation _attn_implementation_internal",
    "attn_implementation _attn_implementation_autoset _experts_implementation use_return_dict _flash_attn_2_enabled",
    "tie_encoder_decoder is_decoder onnx_export",
    # token ids: read by the core and the frontend, not by the model
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id",
    "forced_bos_token_id forced_eos_token_id prefix tokenizer_class add_bos_token add_eos_token",
    # old generation settings: only those in generation_config.json count
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p",
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids",
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
    "max_new_tokens min_new_tokens",
)

# Fields of which only these values are implemented (and None: absent or null), except in families that list them as their own.
ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}

# Fields that every family reads.
USED = words(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
    "rms_norm_eps tie_word_embeddings max_position_embeddings initializer_range rope_theta rope_scaling rope_parameters dtype",
    "torch_dtype layer_types hidden_act partial_rotary_factor sliding_window original_max_position_embeddings",
    "quantization_config compression_config",
)

SILU = frozenset({"silu", "swish"})  # names of hidden_act
# names of it, by family
ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation", "activation_function", "mlp_hidden_act")

DTYPES = ("float32", "bfloat16", "float16")

MAX_LAYERS = 10_000  # each layer has a spec

ROPE_FIELDS = words(
    "rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    "low_freq_factor high_freq_factor short_factor long_factor",
)
ROPE_IRRELEVANT = frozenset({"rope_type", "type", "partial_rotary_factor", "finetuned"})
ROPE_NEEDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def refuse_unknown(
    fields: Json, family: str, used: frozenset[str], activations: frozenset[str] = SILU, given: Json | None = None
) -> None:
    """Raise for fields that are unknown to all families and to this one (`used`), and for values that are not implemented.

    activations: the family's values of hidden_act. given: the fields by their names in config.json.
    """
    given = fields if given is None else given
    known = USED | used | IRRELEVANT | ONLY.keys()
    unknown = sorted(name for name in fields.keys() - known if fields[name] is not None)
    if unknown:
        without = json.dumps(dict.fromkeys(unknown))
        raise ModelConfigError(
            f"config.json sets {', '.join(unknown)}: not known for {family} models, so the model might run wrong. "
            f"Remove what has no effect on the model, or start with --hf-overrides '{without}'."
        )
    for name, allowed in {**ONLY, "hidden_act": tuple(sorted(activations))}.items():
        value = fields.get(name)
        if value is not None and value not in allowed and name not in used:
            expected = f"only {' or '.join(map(repr, allowed))} is" if allowed else "it is not"
            written = next((other for other in ACTIVATION_FIELDS if name == "hidden_act" and given.get(other) == value), name)
            raise ModelConfigError(f"config.json sets {written} to {_short(value)}: {expected} supported")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def size(fields: Json, name: str, default: int | None = None) -> int:
    """A positive integer; num_hidden_layers must also be at most MAX_LAYERS."""
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"config.json lacks {name}")
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise ModelConfigError(f"config.json: {name} must be a positive integer, not {_short(value)}")
    if name == "num_hidden_layers" and value > MAX_LAYERS:
        raise ModelConfigError(f"config.json: num_hidden_layers is {value}: at most {MAX_LAYERS} are supported")
    return value


def number(fields: Json, name: str, default: float, where: str = "config.json") -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise ModelConfigError(f"{where}: {name} must be a number greater than 0, not {_short(value)}")
    return float(value)


def flag(fields: Json, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise ModelConfigError(f"config.json: {name} must be true or false, not {_short(value)}")
    return value


def read_attention(
    fields: Json,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    partial: float | None = None,
    theta: float = 10000.0,
) -> AttentionSpec:
    """Full attention (window 0) with rotary embedding and without QK-norm; families add windows and norms.

    Arguments are defaults of absent fields: default_kv_heads of num_key_value_heads (None: num_attention_heads),
    default_head_dim of head_dim (None: hidden_size / heads), partial of partial_rotary_factor (None: only 1.0 is allowed),
    theta of rope_theta.
    """
    num_heads = size(fields, "num_attention_heads")
    head_dim = _head_dim(fields, num_heads, default_head_dim)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads, default_kv_heads or num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=0,
        rope=read_rope(fields, head_dim, partial=partial, theta=theta),
    )


def with_windows(attention: AttentionSpec, windows: tuple[int, ...]) -> list[AttentionSpec]:
    """The attention of each layer, with that layer's window."""
    return [msgspec.structs.replace(attention, window=window) for window in windows]


def _num_kv_heads(fields: Json, num_heads: int, default: int) -> int:
    is_absent = "num_key_value_heads" not in fields  # null means num_attention_heads, whatever the default is
    num_kv_heads = default if is_absent else size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        of = "the default of an absent num_key_value_heads," if is_absent else "num_key_value_heads"
        raise ModelConfigError(f"config.json: num_attention_heads {num_heads} is not a multiple of {of} {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: Json, num_heads: int, default: int | None) -> int:
    if "head_dim" not in fields and default is not None:
        return default
    hidden_size = size(fields, "hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelConfigError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = size(fields, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelConfigError(f"head_dim {head_dim} is odd: rotary embeddings need an even size")
    return head_dim


def rms_norm_eps(fields: Json) -> float:
    return number(fields, "rms_norm_eps", 1e-6)


def read_dtype(fields: Json) -> str | None:
    """float32, bfloat16 or float16; None: config.json does not say."""
    value = fields.get("dtype")
    if value is None:
        value = fields.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelConfigError(f"config.json: dtype {_short(value)} is not supported; supported are {', '.join(DTYPES)}")
    return name


def read_state_dtype(fields: Json) -> str | None:
    """The dtype of recurrent states; None: config.json does not say."""
    found = {name: fields[name] for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype") if fields.get(name) is not None}
    for name, value in found.items():
        dtype = str(value).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelConfigError(f"config.json: {name} {_short(value)} is not supported; supported are {', '.join(DTYPES)}")
        return dtype
    return None


def qwen_windows(fields: Json) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none, as in Qwen2 and Qwen3: `use_sliding_window` from `max_window_layers` on.

    `layer_types`, if present, takes precedence.
    """
    num_layers = size(fields, "num_hidden_layers")
    window = sliding_window(fields) if flag(fields, "use_sliding_window") else 0
    first = fields.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        raise ModelConfigError(f"config.json: max_window_layers must be an integer, not {_short(first)}")
    by_type = windows_by_type(fields, window)
    return by_type or tuple(window if i >= first else 0 for i in range(num_layers))


def uniform_windows(fields: Json, family: str, window: int) -> tuple[int, ...]:
    """One window for all layers. transformers ignores layer_types for such families, so they must agree with the window."""
    windows = (window,) * size(fields, "num_hidden_layers")
    if windows_by_type(fields, window) not in (None, windows):
        raise ModelConfigError(f"config.json: layer_types of a {family} model contradicts sliding_window")
    return windows


def sliding_window(fields: Json) -> int:
    """0 if sliding_window is null; transformers' 4096 if it is absent."""
    if "sliding_window" in fields and fields["sliding_window"] is None:
        return 0
    return size(fields, "sliding_window", 4096)


def windows_by_type(fields: Json, window: int) -> tuple[int, ...] | None:
    """Each layer's window by layer_types; None without layer_types."""
    types, num_layers = fields.get("layer_types"), size(fields, "num_hidden_layers")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelConfigError(f"config.json: layer_types must list {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelConfigError(f"config.json: layer type {_short(name)} is not supported")
    if "sliding_attention" in types and not window:
        raise ModelConfigError("config.json: layers of sliding_attention need a sliding window, but none is set")
    return tuple(window if name == "sliding_attention" else 0 for name in types)


def rope_parameters(fields: Json) -> tuple[str, Json]:
    """The name and value of rope_scaling (transformers 4) or rope_parameters (5), whichever is present."""
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    params = fields.get(where) or {}
    if not isinstance(params, dict):
        raise ModelConfigError(f"config.json: {where} must be an object, not {_short(params)}")
    return where, params


def read_rope(
    fields: Json, head_dim: int, *, params: Json | None = None, partial: float | None = None, theta: float = 10000.0
) -> RopeConfig:
    """Rotary embedding of heads of head_dim. params: replaces the model's parameters, if layers differ. See read_attention."""
    max_positions = size(fields, "max_position_embeddings")
    where, found = rope_parameters(fields)
    params = found if params is None else params
    type_name = params.get("rope_type", params.get("type", "default"))
    if not isinstance(type_name, str) or type_name not in ROPE_NEEDS:
        raise ModelConfigError(f"rope type {_short(type_name)} is not supported; supported are {', '.join(ROPE_NEEDS)}")
    unknown = sorted(params.keys() - ROPE_FIELDS - ROPE_IRRELEVANT)
    if unknown:
        raise ModelConfigError(
            f"config.json: {where} sets {', '.join(unknown)}: not supported; --hf-overrides can give another {where}"
        )
    rotary_dim = _rotary_dim(fields, where, params, head_dim, partial)
    for name in ROPE_NEEDS[type_name]:
        if params.get(name) is None:
            raise ModelConfigError(f"config.json: {where} of type {type_name} lacks {name}")

    def param(name: str, default: float) -> float:
        return number(params, name, default, where)

    def maybe(name: str) -> float | None:
        return None if params.get(name) is None else param(name, 0.0)

    original = _original_positions(fields, params, max_positions)
    short, long = (_factors(params, where, name, (rotary_dim or head_dim) // 2) for name in ("short_factor", "long_factor"))
    return RopeConfig(
        type=type_name,
        rotary_dim=rotary_dim,
        short_factor=short if type_name == "longrope" else (),
        long_factor=long if type_name == "longrope" else (),
        theta=param("rope_theta", number(fields, "rope_theta", theta)),
        factor=param("factor", max_positions / original if type_name in ("yarn", "longrope") else 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=param("low_freq_factor", 1.0),
        high_freq_factor=param("high_freq_factor", 4.0),
        attention_factor=maybe("attention_factor"),
        beta_fast=param("beta_fast", 32.0),
        beta_slow=param("beta_slow", 1.0),
        mscale=maybe("mscale") if params.get("mscale") else None,  # 0 means none
        mscale_all_dim=maybe("mscale_all_dim") if params.get("mscale_all_dim") else None,
        truncate=flag(params, "truncate", True),
    )


def _rotary_dim(fields: Json, where: str, params: Json, head_dim: int, partial: float | None) -> int:
    """Rotated elements of a head; 0: all. Raises if only some are rotated and the family rotates whole heads."""
    name = "partial_rotary_factor"
    factor = number(params, name, number(fields, name, 1.0 if partial is None else partial), where)
    if factor > 1.0 or (partial is None and factor != 1.0):
        raise ModelConfigError(f"config.json: {where} sets {name} to {factor}: only 1.0 is supported")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or rotary_dim < 2:
        raise ModelConfigError(f"config.json: {name} {factor} rotates {rotary_dim} of {head_dim} elements: it must be even")
    return rotary_dim if rotary_dim < head_dim else 0


def _factors(params: Json, where: str, name: str, count: int) -> tuple[float, ...]:
    """longrope's factors, one for each pair."""
    values = params.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) != count or any(type(x) not in (int, float) or not x > 0 for x in values):
        raise ModelConfigError(f"config.json: {where}: {name} must list {count} numbers greater than 0, not {_short(values)}")
    return tuple(float(x) for x in values)


def _original_positions(fields: Json, params: Json, max_positions: int) -> int:
    """Context length before scaling. A top-level field takes precedence, as in transformers."""
    for source in (fields, params):
        if source.get("original_max_position_embeddings") is not None:
            return size(source, "original_max_position_embeddings")
    return max_positions
