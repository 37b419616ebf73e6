"""Whether a tokenizer keeps every character of a text: then the number of characters bounds the number of tokens from below.

It does not where a token takes the blanks around it (lstrip, rstrip), where a normalizer can make a text shorter, where words
are split at blanks that are dropped, or where characters that the vocabulary lacks are dropped or joined to one unknown token.
Only what is known to keep all is said to: any other tokenizer's texts are counted in tokens before they are refused.
"""

import json
from typing import Any

import tokenizers


def keeps_characters(backend: tokenizers.Tokenizer) -> bool:
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return False
    splits = [step["type"] for step in _steps(backend.pre_tokenizer, "pretokenizers")]
    known = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"}
    removes = any(step.get("behavior") == "Removed" for step in _steps(backend.pre_tokenizer, "pretokenizers"))
    normalizers = _steps(backend.normalizer, "normalizers")
    if removes or not known.issuperset(splits) or not all(map(_only_lengthens, normalizers)):
        return False
    model = backend.model
    bytes_of_text = "ByteLevel" in splits or any(step["type"] == "ByteLevel" for step in normalizers)
    return isinstance(model, tokenizers.models.BPE) and (bytes_of_text or model.byte_fallback)


def _only_lengthens(step: dict[str, Any]) -> bool:
    """A normalizer after which a text has no fewer characters."""
    match step["type"]:
        case "Prepend" | "ByteLevel":
            return True
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and len(step["content"]) >= len(pattern)
        case _:
            return False


def _steps(part: Any, of_sequence: str) -> list[dict[str, Any]]:
    """The configuration of a normalizer or a pre-tokenizer as a flat list of steps."""
    todo = [json.loads(part.__getstate__())] if part is not None else []
    steps = []
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step[of_sequence] + todo
        else:
            steps.append(step)
    return steps
