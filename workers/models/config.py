"""config.json of a model folder -> ModelConfig, the frozen description that models, KV cache and runner are built from.

Plain JSON: no transformers, no torch. Spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`, `layer_types`) are read alike, and a field that is absent has the value that transformers gives it.
Every field is used, known to be irrelevant (`IRRELEVANT`), or refused by name: a model that would run wrong does not run.
Does not read generation_config.json or tokenizer files; that is `quire.enginecore.loading.model_files`.
"""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn"]
Json = dict[str, Any]

# Architecture (config.json's "architectures") -> family. models/build.py has the class of each.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

GPU_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)  # what the GPU kernels are built for; a CPU takes any even size


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Fields that cannot change what a served model computes.
IRRELEVANT = _names(
    # provenance and bookkeeping
    "_name_or_path name_or_path model_type transformers_version _commit_hash auto_map finetuning_task task_specific_params",
    "problem_type id2label label2id num_labels custom_pipelines unsloth_version unsloth_fixed",
    # training only
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout gradient_checkpointing pruned_heads",
    "pretraining_tp router_aux_loss_coef loss_type",
    # how transformers runs it, not what it computes
    "use_cache output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript",
    "use_bfloat16 tf_legacy_loss chunk_size_feed_forward _attn_implementation _attn_implementation_internal",
    "attn_implementation _attn_implementation_autoset _experts_implementation use_return_dict _flash_attn_2_enabled",
    "tie_encoder_decoder is_decoder onnx_export",
    # the core and the frontend read the tokens that matter from here; the model does not
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id",
    "forced_bos_token_id forced_eos_token_id prefix tokenizer_class add_bos_token add_eos_token",
    # generation settings of old: generation_config.json is where they count
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p",
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids",
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
    "max_new_tokens min_new_tokens",
)

# Fields that are read, but only one value of each is implemented (None, that is absent or null, always is).
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}

USED = _names(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
    "rms_norm_eps tie_word_embeddings max_position_embeddings initializer_range rope_theta rope_scaling rope_parameters dtype",
    "torch_dtype layer_types sliding_window original_max_position_embeddings",
)
USED_BY_FAMILY: dict[Family, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset(),
    "qwen2": frozenset({"use_sliding_window", "max_window_layers"}),
    "qwen3": frozenset({"use_sliding_window", "max_window_layers", "attention_bias"}),
}

DTYPES = ("float32", "bfloat16", "float16")

ROPE_FIELDS = _names(
    "rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    "low_freq_factor high_freq_factor",
)
ROPE_IRRELEVANT = frozenset({"rope_type", "type", "partial_rotary_factor", "finetuned"})
ROPE_NEEDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


class ModelConfigError(ValueError):
    """The model cannot be served; the text names the field and is meant for the user."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Fields that `type` does not use are ignored, as transformers ignores them."""

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: derived from factor, mscale and mscale_all_dim
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer as its checkpoint describes it."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]  # per layer: 0 sees everything, otherwise the last `window` tokens, the token itself included
    attention_bias: bool  # llama, qwen3: of q, k, v and o; qwen2 always has q, k and v
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    dtype: str | None  # float32, bfloat16, float16; None: config.json does not say

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(model_dir: str | Path) -> ModelConfig:
    """ModelConfig of the folder's config.json. Raises ModelConfigError for a model that cannot be served."""
    path = Path(model_dir) / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelConfigError(f"{path} does not exist") from None
    except ValueError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    return parse_model_config(fields)


def parse_model_config(fields: Json) -> ModelConfig:
    """ModelConfig from config.json's fields. Raises ModelConfigError, naming the field, for what is not supported."""
    architecture, family = _architecture(fields)
    _refuse_unknown(fields, family)
    hidden_size = _size(fields, "hidden_size")
    num_layers = _size(fields, "num_hidden_layers")
    num_heads = _size(fields, "num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, family, num_heads)
    max_positions = _size(fields, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        rope=_rope(fields, max_positions),
        windows=_windows(fields, family, num_layers),
        attention_bias=family == "qwen2" or _flag(fields, "attention_bias"),
        mlp_bias=_flag(fields, "mlp_bias"),
        tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
        max_position_embeddings=max_positions,
        initializer_range=_number(fields, "initializer_range", 0.02),
        dtype=_dtype(fields),
    )


def kv_groups(config: ModelConfig) -> list[tuple[int, list[int]]]:
    """Layers that share a block table: (window, layers), full attention (window 0) first where there is any."""
    return [(window, [i for i, w in enumerate(config.windows) if w == window]) for window in sorted(set(config.windows))]


def _architecture(fields: Json) -> tuple[str, Family]:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelConfigError('config.json lacks "architectures", which names the model class')
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise ModelConfigError(f"architecture {names[0]} is not supported; supported are {', '.join(FAMILIES)}")


def _refuse_unknown(fields: Json, family: Family) -> None:
    """Raise for fields that this code does not know, and for values that it does not implement."""
    known = USED | USED_BY_FAMILY[family] | IRRELEVANT | ONLY.keys()
    unknown = sorted(name for name in fields.keys() - known if fields[name] is not None)
    if unknown:
        raise ModelConfigError(
            f"config.json sets {', '.join(unknown)}: not known for {family} models, so the model might run wrong. "
            "Remove what has no effect on the model."
        )
    for name, allowed in ONLY.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            expected = f"only {' or '.join(map(repr, allowed))} is" if allowed else "it is not"
            raise ModelConfigError(f"config.json sets {name} to {_short(value)}: {expected} supported")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _size(fields: Json, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"config.json lacks {name}")
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise ModelConfigError(f"config.json: {name} must be a positive integer, not {_short(value)}")
    return value


def _number(fields: Json, name: str, default: float, where: str = "config.json") -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise ModelConfigError(f"{where}: {name} must be a number greater than 0, not {_short(value)}")
    return float(value)


def _flag(fields: Json, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise ModelConfigError(f"config.json: {name} must be true or false, not {_short(value)}")
    return value


def _num_kv_heads(fields: Json, family: Family, num_heads: int) -> int:
    # transformers' defaults for an absent field differ by family (Mistral 8, Qwen 32): only Llama's is unambiguous.
    if "num_key_value_heads" not in fields and family != "llama":
        raise ModelConfigError("config.json lacks num_key_value_heads")
    num_kv_heads = _size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: Json, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" not in fields and family == "qwen3":
        return 128
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelConfigError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = _size(fields, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelConfigError(f"head_dim {head_dim} is odd: rotary embeddings need an even size")
    return head_dim


def _dtype(fields: Json) -> str | None:
    value = fields.get("dtype")
    if value is None:
        value = fields.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelConfigError(f"config.json: dtype {_short(value)} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _windows(fields: Json, family: Family, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for full attention."""
    window = _window(fields, family)
    if family in ("qwen2", "qwen3"):
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int or first < 0:
            raise ModelConfigError(f"config.json: max_window_layers must be an integer, not {_short(first)}")
    else:
        first = 0
    windows = tuple(window if i >= first else 0 for i in range(num_layers))
    types = fields.get("layer_types")
    if types is None:
        return windows
    by_type = _windows_by_type(types, window, num_layers)
    # transformers ignores layer_types for Llama and Mistral: there it must say what the other fields say.
    if family in ("llama", "mistral") and by_type != windows:
        raise ModelConfigError(f"config.json: layer_types of a {family} model contradicts sliding_window")
    return by_type


def _window(fields: Json, family: Family) -> int:
    """The model's window, 0 for none. Absent, it is 4096 for Mistral, and for Qwen with use_sliding_window."""
    if family in ("qwen2", "qwen3") and not _flag(fields, "use_sliding_window"):
        return 0
    if family == "llama":
        if fields.get("sliding_window") is not None:
            raise ModelConfigError("config.json sets sliding_window: not supported for llama models")
        return 0
    if "sliding_window" in fields and fields["sliding_window"] is None:
        return 0
    return _size(fields, "sliding_window", 4096)


def _windows_by_type(types: Any, window: int, num_layers: int) -> tuple[int, ...]:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelConfigError(f"config.json: layer_types must list {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelConfigError(f"config.json: layer type {_short(name)} is not supported")
    if "sliding_attention" in types and not window:
        raise ModelConfigError("config.json: layer_types has sliding_attention, but no sliding window is set")
    return tuple(window if name == "sliding_attention" else 0 for name in types)


def _rope(fields: Json, max_positions: int) -> RopeConfig:
    """Rotary embedding from rope_scaling (transformers 4) or rope_parameters (5), whichever is there."""
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    params = fields.get(where) or {}
    if not isinstance(params, dict):
        raise ModelConfigError(f"config.json: {where} must be an object, not {_short(params)}")
    type_name = params.get("rope_type", params.get("type", "default"))
    if type_name not in ROPE_NEEDS:
        raise ModelConfigError(f"rope type {_short(type_name)} is not supported; supported are {', '.join(ROPE_NEEDS)}")
    unknown = sorted(params.keys() - ROPE_FIELDS - ROPE_IRRELEVANT)
    if unknown:
        raise ModelConfigError(f"config.json: {where} sets {', '.join(unknown)}: not supported")
    if params.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelConfigError(f"config.json: {where} sets partial_rotary_factor: only 1.0 is supported")
    for name in ROPE_NEEDS[type_name]:
        if params.get(name) is None:
            raise ModelConfigError(f"config.json: {where} of type {type_name} lacks {name}")

    def number(name: str, default: float) -> float:
        return _number(params, name, default, where)

    def maybe(name: str) -> float | None:
        return None if params.get(name) is None else number(name, 0.0)

    original = _original_positions(fields, params, max_positions)
    return RopeConfig(
        type=type_name,
        theta=number("rope_theta", _number(fields, "rope_theta", 10000.0)),
        factor=number("factor", max_positions / original if type_name == "yarn" else 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        attention_factor=maybe("attention_factor"),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=maybe("mscale"),
        mscale_all_dim=maybe("mscale_all_dim"),
        truncate=_flag(params, "truncate", True),
    )


def _original_positions(fields: Json, params: Json, max_positions: int) -> int:
    """Context length before scaling. A top-level field goes first, as in transformers."""
    for source in (fields, params):
        if source.get("original_max_position_embeddings") is not None:
            return _size(source, "original_max_position_embeddings")
    return max_positions
