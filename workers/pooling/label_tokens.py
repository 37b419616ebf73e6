"""The tokens that a reranker scores by their logits, by vLLM's fields of config.json: classifier_from_token and method."""

from pathlib import Path
from typing import Any

from quire.workers.models.config import ModelConfigError

_METHODS = ("from_2_way_softmax", "no_post_processing")


def label_tokens(fields: dict[str, Any], model_dir: Path) -> tuple[tuple[int, ...], bool]:
    """(the tokens' ids, whether the score is that of the second over the first: a softmax over both is the sigmoid of their
    difference). No ids if config.json names none. Raises ModelConfigError."""
    named = fields.get("classifier_from_token")
    if named is None:
        return (), False
    if not isinstance(named, list) or not named or not all(isinstance(token, str) for token in named):
        raise ModelConfigError("config.json: classifier_from_token must be a list of tokens")
    method = fields.get("method") or ("from_2_way_softmax" if len(named) == 2 else "no_post_processing")
    if method not in _METHODS:
        raise ModelConfigError(f"config.json: method {method!r:.60} is not supported; supported are {', '.join(_METHODS)}")
    if method == "from_2_way_softmax" and len(named) != 2:
        raise ModelConfigError("config.json: from_2_way_softmax needs two tokens in classifier_from_token")
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelConfigError(f"classifier_from_token needs a tokenizer.json, and {model_dir} has none")
    from tokenizers import Tokenizer  # few models need it

    tokenizer = Tokenizer.from_file(str(path))
    ids: list[int] = []
    for token in named:
        if (found := tokenizer.token_to_id(token)) is None:
            raise ModelConfigError(f"config.json: classifier_from_token: {token!r:.60} is no token of the tokenizer")
        ids.append(found)
    return tuple(ids), method == "from_2_way_softmax"


STEP_TAG = "<extra_0>"  # behind each step of what Qwen's models of rewards for steps read


def step_tag(pooler_config: dict[str, Any], model_dir: Path) -> int:
    """The token that a step's scores belong to, by --pooler-config, else by its usual spelling; -1: all tokens have scores.

    Raises ModelConfigError."""
    given = pooler_config.get("step_tag_id")
    if given is not None:
        if type(given) is not int or given < 0:
            raise ModelConfigError(f"--pooler-config: step_tag_id must be the id of a token, not {given!r:.40}")
        return given
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return -1
    from tokenizers import Tokenizer  # few models need it

    found = Tokenizer.from_file(str(path)).token_to_id(STEP_TAG)
    return -1 if found is None else int(found)
