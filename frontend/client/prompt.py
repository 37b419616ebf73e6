"""The forms of a prompt in Python: vLLM's forms for text models."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from quire.frontend.client.stream import InvalidRequest


class TextPrompt(TypedDict):
    """A prompt as text. cache_salt: only requests with the same salt share prefixes in the cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: their text, which outputs repeat."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or a dict like the two above
PromptType = Prompt  # vLLM's name


class PromptParts(NamedTuple):
    """The parts of a prompt: at least one of text and ids. cache_salt: "" for none."""

    text: str | None
    ids: Sequence[int] | None
    cache_salt: str = ""


_KEYS = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()


def split_prompt(prompt: Prompt) -> PromptParts:
    """Raises InvalidRequest for a mapping with other keys, which would change the answer if they were supported; TypeError for
    anything that is no prompt."""
    salt = None
    if isinstance(prompt, Mapping):
        if unknown := [str(key) for key, value in prompt.items() if key not in _KEYS and value is not None]:
            raise InvalidRequest(f"a prompt holds prompt, prompt_token_ids or cache_salt; not supported: {', '.join(unknown)}")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    no_ids = isinstance(ids, str | bytes) or not hasattr(ids, "__len__")
    if not isinstance(text, str | None) or (no_ids and (ids is not None or text is None)):
        raise TypeError("a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}")
    if not isinstance(salt, str | None):
        raise TypeError(f"cache_salt must be a string, got {type(salt).__name__}")
    return PromptParts(text, ids, salt or "")
