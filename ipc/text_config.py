"""Vocabulary size and context length from a config.json, read without torch, whatever a family calls them or nests them in.

The worker reads the whole config (quire.workers.models); the two must agree on these fields. Called by the core
(enginecore/loading/model_files.py) and by `quire estimate`.
"""

from typing import Any

MAX_CONTEXT = 1 << 24  # tokens; tables grow with it. The longest published context has 10 million
MAX_VOCABULARY = 1 << 22  # tokens; the core keeps a text for each. The largest published vocabularies have 0.26 million

# transformers' defaults for absent fields, by model_type, for models with published configs that leave them out.
_GEMMA3 = {"vocab_size": 262208, "max_position_embeddings": 131072}
_GEMMA4 = {"vocab_size": 262144, "max_position_embeddings": 131072}
_GEMMA4_UNIFIED = {"vocab_size": 262144, "max_position_embeddings": 262144}
_LLAMA4 = {"vocab_size": 202048, "max_position_embeddings": 131072}
_DEFAULTS: dict[str, dict[str, int]] = {
    "bloom": {"max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mamba2": {"max_position_embeddings": 1 << 18},  # it has no positions: as long as Codestral Mamba was tested
    "mistral4": {"vocab_size": 131072, "max_position_embeddings": 1048576},
}
# The same for text models that are nested in a multimodal model's config, whose configs leave out more.
NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _GEMMA3,
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
    },
    "gemma4_unified_text": _GEMMA4_UNIFIED,
}
# Names of the context length's field; the first that is present counts.
POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length",
    "max_target_positions", "model_max_length",
)  # fmt: skip
_NOT_STRETCHED = (
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
)  # max_position_embeddings is the length after scaling


# Fields that only models with recurrent layers have.
_OF_RECURRENT_MODELS = (
    "attn_layer_indices",
    "conv_L_cache",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_conv",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)
_NAMES_OF_TEXT = ("text_config", "llm_config")  # the second is InternVLChatModel's


def nested_text(config: dict[str, Any]) -> dict[str, Any] | None:
    """The text model's fields that are nested in a multimodal model's config; None if none are."""
    return next((text for name in _NAMES_OF_TEXT if isinstance(text := config.get(name), dict)), None)


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The config's fields, overridden by those of its text model, with max_position_embeddings and vocab_size if known."""
    text = nested_text(config)
    fields = {**config, **text} if text is not None else dict(config)
    kind = str(fields.get("model_type"))
    defaults = {**_DEFAULTS.get(kind, {}), **(NESTED_DEFAULTS.get(kind, {}) if text is not None else {})}
    positions = [fields[name] for name in POSITIONS if fields.get(name) is not None]
    return {**defaults, **fields, **({"max_position_embeddings": positions[0]} if positions else {})}


def keeps_states(fields: dict[str, Any]) -> bool:
    """Whether layers of the model are recurrent, so that each sequence has a state beside its KV blocks."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    kinds = kinds if isinstance(kinds, list) else []
    listed = any("attention" not in str(kind) or "linear" in str(kind) for kind in kinds if str(kind) not in ("mlp", "moe"))
    return listed or any(fields.get(name) for name in _OF_RECURRENT_MODELS)


def checked_context(length: int) -> int:
    """The length, of the positions with rope_scaling. Raises ValueError for one beyond MAX_CONTEXT."""
    if length > MAX_CONTEXT:
        raise ValueError(
            f"config.json: max_position_embeddings, with rope_scaling, is {length}: at most {MAX_CONTEXT} are supported"
        )
    return length


def checked_vocabulary(size: int) -> int:
    """The number of tokens. Raises ValueError for more than MAX_VOCABULARY."""
    if size > MAX_VOCABULARY:
        raise ValueError(f"config.json: vocab_size is {size}: at most {MAX_VOCABULARY} are supported")
    return size


def is_stretched(fields: dict[str, Any]) -> bool:
    """Whether scaling of the rotary embedding extends the context beyond max_position_embeddings."""
    return fields.get("model_type") not in _NOT_STRETCHED


def stretched_context(config: dict[str, Any], positions: int) -> int:
    """The model's positions, stretched by linear and yarn scaling (yarn from its original length). As in vLLM. Raises
    ValueError."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError("config.json: rope_scaling must be an object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor")
    if (
        rope_type not in ("linear", "yarn")
        or not is_stretched(config)
        or not isinstance(factor, (int, float))
        or not 1 <= factor <= 1 << 20
    ):
        return positions
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    if rope_type == "yarn" and isinstance(original, int) and original > 0:
        positions = original
    return int(positions * factor)
