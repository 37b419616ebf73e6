"""Vocabulary size and context length from a config.json, read without torch, whatever a family calls them or nests them in.

The worker reads the whole config (quire.workers.models); the two must agree on these fields. Called by the core
(enginecore/loading/model_files.py) and by `quire estimate`.
"""

from typing import Any

MAX_CONTEXT = 1 << 24  # tokens; tables grow with it. The longest published context has 10 million

# transformers' defaults for absent fields, by model_type, for models with published configs that leave them out.
_GEMMA3 = {"vocab_size": 262208, "max_position_embeddings": 131072}
_GEMMA4 = {"vocab_size": 262144, "max_position_embeddings": 131072}
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
    "mistral4": {"vocab_size": 131072, "max_position_embeddings": 1048576},
}
# Names of the context length's field; the first that is present counts.
POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length",
    "max_target_positions",
)  # fmt: skip
_NOT_STRETCHED = ("gemma3", "gemma3_text", "gemma4", "gemma4_text")  # max_position_embeddings is the length after scaling


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The config's fields, overridden by those of its text_config, with max_position_embeddings and vocab_size if known."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, dict) else dict(config)
    defaults = _DEFAULTS.get(str(fields.get("model_type")), {})
    positions = [fields[name] for name in POSITIONS if fields.get(name) is not None]
    return {**defaults, **fields, **({"max_position_embeddings": positions[0]} if positions else {})}


def is_stretched(fields: dict[str, Any]) -> bool:
    """Whether scaling of the rotary embedding extends the context beyond max_position_embeddings."""
    return fields.get("model_type") not in _NOT_STRETCHED
