"""The sizes of an encoder's steps for `quire estimate`: its texts are computed whole and leave nothing behind."""

import json
from pathlib import Path

from quire.frontend.cli.estimate_model import Model
from quire.ipc.config import EngineConfig
from quire.ipc.encoders import MOST_TOKENS, is_encoder, longest_text
from quire.ipc.memory_plan import default_max_num_batched_tokens
from quire.ipc.whole_images import whole_image


def computes_whole_texts(model: Model) -> bool:
    """Whether it is an encoder."""
    return is_encoder(model.config or {})


def step_tokens(model: Model, config: EngineConfig, length: int, *, is_gpu: bool) -> tuple[int, int]:
    """(tokens of a step, the longest request), as the core decides (enginecore/whole_texts.py)."""
    image = 0 if config.language_model_only else min(whole_image(model.config or {}, Path(model.folder or "")), length)
    tokens = config.max_num_batched_tokens or max(default_max_num_batched_tokens(is_gpu), image)
    if not computes_whole_texts(model):
        return tokens, length
    length = min(longest_text(model.config or {}, length), _max_seq_length(model.folder) or length)
    if config.max_num_batched_tokens is None:
        tokens = max(tokens, min(length, MOST_TOKENS))
    return tokens, min(length, tokens)


def _max_seq_length(folder: str | None) -> int | None:
    try:
        value = json.loads((Path(folder or "") / "sentence_bert_config.json").read_bytes()).get("max_seq_length")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return value if type(value) is int and value > 0 else None


def texts_at_once(tokens: int, length: int) -> str:
    texts = max(tokens // length, 1)
    how_many = "a text" if texts == 1 else f"{texts:,} texts"
    return f"A step computes {how_many} of {length:,} tokens, or more short ones; they need no cache."


def draws_tokens(model: Model, config: EngineConfig) -> bool:
    """Whether tokens are sampled: not by a model that only makes vectors and scores."""
    return not computes_whole_texts(model) and config.runner != "pooling"
