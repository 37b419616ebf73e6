"""The forms of a prompt in Python: vLLM's forms for text models."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from quire.frontend.client.stream import InvalidRequest


class TextPrompt(TypedDict):
    """A prompt as text. cache_salt: only requests with the same salt share prefixes in the cache. multi_modal_data: images, one
    for each of the prompt's placeholders (media_data.py). mm_processor_kwargs: settings of the processor for these."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: their text, which outputs repeat. marks: numbers of tokens after which other prompts may
    go on, at most 8; models with recurrent layers keep states there. multi_modal_data: media_data.py."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    marks: NotRequired[Sequence[int]]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or a dict like the two above
PromptType = Prompt  # vLLM's name


class PromptParts(NamedTuple):
    """The parts of a prompt: at least one of text and ids. cache_salt: "" for none. media, media_options: its
    multi_modal_data and mm_processor_kwargs."""

    text: str | None
    ids: Sequence[int] | None
    cache_salt: str = ""
    marks: Sequence[int] = ()
    media: Any = None
    media_options: Any = None


_NOT_HERE = {
    "prompt_embeds": "prompts are texts or token ids",
    "encoder_prompt": "models without an encoder are served",
}
_KEYS = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()


def split_prompt(prompt: Prompt) -> PromptParts:
    """Raises InvalidRequest for a mapping with other keys, which would change the answer if they were supported; ValueError for
    anything that is no prompt."""
    salt: Any = None
    marks: Any = ()
    media: Any = None
    options: Any = None
    if isinstance(prompt, Mapping):
        if unknown := [str(key) for key, value in prompt.items() if key not in _KEYS and value is not None]:
            why = next((f": {_NOT_HERE[key]}" for key in unknown if key in _NOT_HERE), "")
            said = f"a prompt holds prompt, prompt_token_ids or cache_salt; not supported: {', '.join(unknown)}{why}"
            raise InvalidRequest(said)
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        marks, media = prompt.get("marks") or (), prompt.get("multi_modal_data")
        options = prompt.get("mm_processor_kwargs")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    no_ids = isinstance(ids, str | bytes) or not hasattr(ids, "__len__")
    if not isinstance(text, str | None) or (no_ids and (ids is not None or text is None)):
        raise ValueError("a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}")
    if not isinstance(salt, str | None):
        raise ValueError(f"cache_salt must be a string, got {type(salt).__name__}")
    if not isinstance(marks, list | tuple) or not all(isinstance(mark, int) for mark in marks):
        raise ValueError("marks must be a list of numbers of tokens")
    return PromptParts(text, ids, salt or "", marks, media, options)
