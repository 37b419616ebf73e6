"""Tokenize prompts without blocking the event loop: short texts at once, long ones in a thread; and check token ids."""

from collections.abc import Sequence

import numpy as np

from quire.frontend.client.stream import InvalidRequest, TooLong
from quire.frontend.client.turns import in_native_thread
from quire.frontend.text.tokenizer import LONG_TEXT, Tokenizer, TooManyTokens
from quire.ipc.limits import longest_prompt, output_room
from quire.ipc.messages.frontend import EngineLimits

MOST_TOKENS = 1 << 19  # of one text, unless the context is longer: making a list of so many takes 30 ms
_USUAL_CHARS = 8  # most tokens stand for fewer
_PART_CHARS = 64 << 10
_LOST_AT_CUT = 32  # extra tokens that a chunk may have because the text was cut


async def encode_prompt(tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int) -> list[int]:
    """Token ids of a text. Raises TooLong, before it makes the list of ids, for a text that can never fit into the context."""
    return (await encode_marked(tokenizer, text, add_special_tokens, max_model_len, ()))[0]


async def encode_marked(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int, ends: Sequence[int]
) -> tuple[list[int], tuple[int, ...]]:
    """As `encode_prompt`, and the text's marks in tokens (Tokenizer.encode_marked)."""
    if len(text) <= LONG_TEXT:
        return tokenizer.encode_marked(text, add_special_tokens, ends)
    has_many = len(text) > max_model_len * tokenizer.max_token_chars
    if has_many and tokenizer.keeps_characters:
        raise TooLong(f"the prompt has {len(text)} characters, more than {max_model_len} tokens can hold")
    most = max(max_model_len, MOST_TOKENS)
    try:
        # of characters that may be no tokens, no more are tokenized than it takes to know that they are too many
        most_of_parts = max_model_len if has_many else most
        return await in_native_thread(_encode, tokenizer, text, add_special_tokens, ends, most, most_of_parts)
    except TooManyTokens as error:
        raise TooLong(f"the prompt cannot be used: {error}") from None


def _encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, ends: Sequence[int], most: int, most_of_parts: int
) -> tuple[list[int], tuple[int, ...]]:
    """Count the tokens of a very long text in chunks first: as a whole it takes 150 bytes a character and a second a
    megabyte."""
    if len(text) > most_of_parts * _USUAL_CHARS:
        count = 0
        for start in range(0, len(text), _PART_CHARS):
            part = text[start : start + _PART_CHARS]
            if not tokenizer.keeps_characters:
                part = part.strip()  # a token beyond the cut may take the blanks
            count += max(0, tokenizer.count(part) - _LOST_AT_CUT)
            if count > most_of_parts:
                raise TooManyTokens(f"the text has more than {most_of_parts} tokens")
    return tokenizer.encode_marked(text, add_special_tokens, ends, most)


async def encode_end(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int, at_start: bool, max_model_len: int
) -> list[int]:
    """At least the last `keep` ids of a text, or the first; no more text is tokenized than it takes to have as many.

    Where characters may be no tokens (see Tokenizer.keeps_characters), more and more of the text is tokenized until there are.
    Raises TooLong.
    """
    chars = min(max(keep, 0) + 1, max_model_len) * tokenizer.max_token_chars
    while True:
        part = text[:chars] if at_start else text[-chars:]
        if not tokenizer.keeps_characters:
            part = _beyond_blanks(text, part, at_start, tokenizer.max_token_chars)
        ids = await encode_prompt(tokenizer, part, add_special_tokens, max_model_len)
        if tokenizer.keeps_characters or len(part) == len(text) or len(ids) >= keep + _LOST_AT_CUT:
            return ids
        chars *= 4


def _beyond_blanks(text: str, part: str, at_start: bool, max_token_chars: int) -> str:
    """A part of a text, with the blanks at its cut and a token behind them, which may take them."""
    if at_start:
        end = len(text) - len(text[len(part) :].lstrip())
        return text[: end + max_token_chars]
    start = len(text[: len(text) - len(part)].rstrip())
    return text[max(0, start - max_token_chars) :]


def checked_ids(
    prompt_token_ids: Sequence[int] | np.ndarray, limits: EngineLimits, max_tokens: int | None = None
) -> np.ndarray:
    """The ids as they are sent to the core, int32. max_tokens: the request's. Raises InvalidRequest, TooLong."""
    count = len(prompt_token_ids)
    if count == 0:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    if output_room(count, limits.max_model_len, max_tokens) < 1:
        raise TooLong(
            f"the prompt has {count} tokens; with room for one more, at most {longest_prompt(limits.max_model_len)} fit"
            f" into the context of {limits.max_model_len}"
        )
    try:
        ids = np.asarray(prompt_token_ids)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest("the prompt must be a list of token ids") from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InvalidRequest("the prompt must be a list of token ids")
    # viewed as unsigned, negative ids are the largest
    if np.maximum.reduce(ids.astype(np.int64, copy=False).view(np.uint64)) >= limits.vocab_size:
        raise InvalidRequest(f"the prompt holds a token id outside the vocabulary of {limits.vocab_size}")
    return ids.astype("<i4")
