"""The shapes that Python's users may give a prompt in."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.client.stream import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}

_KEYS = {"prompt", "prompt_token_ids"}


def split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """(text, token ids) of a prompt, at least one of them. Raises InvalidRequest for a mapping with other keys, which would
    change the answer if they were heeded; TypeError for what is no prompt."""
    if isinstance(prompt, Mapping):
        if unknown := prompt.keys() - _KEYS:
            raise InvalidRequest(f"a prompt holds prompt or prompt_token_ids; not supported: {', '.join(map(str, unknown))}")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    no_ids = isinstance(ids, str | bytes) or not hasattr(ids, "__len__")
    if not isinstance(text, str | None) or (no_ids and (ids is not None or text is None)):
        raise TypeError("a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}")
    return text, ids
