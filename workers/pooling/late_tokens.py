"""Ids of the tokens that models of token vectors and of sparse vectors treat apart, by the tokenizer's files.

A model of token vectors (ColBERT) has markers, a token that fills queries, and a list of words without a vector; BGE-M3 gives
no weight to the tokens around a text. Few models need these, so `tokenizers` is imported where they are read.
"""

import json
from pathlib import Path
from typing import Any

from quire.ipc.pooling import LateInteraction
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling import sentence_transformers

_UNWEIGHTED = ("cls_token", "bos_token", "sep_token", "eos_token", "pad_token", "unk_token")


def late_interaction(settings: sentence_transformers.LateInteraction, folder: Path) -> LateInteraction:
    """The checkpoint's settings with its tokens' ids. Raises ModelConfigError for a marker that is no token."""
    tokenizer = _tokenizer(folder)
    mask = _named(folder).get("mask_token") or "[MASK]"
    return LateInteraction(
        query_marker=_id(tokenizer, settings.query_prefix, "query_prefix"),
        document_marker=_id(tokenizer, settings.document_prefix, "document_prefix"),
        query_length=settings.query_length,
        document_length=settings.document_length or 0,
        mask_id=_id(tokenizer, mask, "mask_token") if settings.expands else -1,
        expands=settings.expands,
        attends_to_expansion=settings.attends_to_expansion,
        skipped=sorted({token for word in settings.skiplist for token in _word(tokenizer, word)}),
    )


def unweighted(folder: Path) -> tuple[int, ...]:
    """Ids of the special tokens that have no weight in sparse vectors of BGE-M3."""
    tokenizer, named = _tokenizer(folder), _named(folder)
    found = (tokenizer.token_to_id(named[name]) for name in _UNWEIGHTED if name in named)
    return tuple(sorted({token for token in found if token is not None}))


def _tokenizer(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelConfigError(f"vectors of tokens need a tokenizer.json, and {folder} has none")
    from tokenizers import Tokenizer  # few models need it

    return Tokenizer.from_file(str(path))


def _named(folder: Path) -> dict[str, str]:
    """The texts of named special tokens."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            fields = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        for token, value in fields.items() if isinstance(fields, dict) else ():
            text = value.get("content") if isinstance(value, dict) else value
            if token.endswith("_token") and isinstance(text, str):
                named[token] = text
    return named


def _id(tokenizer: Any, token: str, what: str) -> int:
    """The id of a token by its spelling. Some checkpoints write a marker with a space behind it, and some do not."""
    for spelling in (token, token.strip()):
        if (found := tokenizer.token_to_id(spelling)) is not None:
            return int(found)
    raise ModelConfigError(f"{what} {token!r:.40} is no token of the tokenizer: queries and documents could not be told apart")


def _word(tokenizer: Any, word: str) -> list[int]:
    """The ids of a word without a vector: that of its spelling, else of its first piece."""
    whole = tokenizer.token_to_id(word)
    return [whole] if whole is not None else tokenizer.encode(word, add_special_tokens=False).ids[:1]
