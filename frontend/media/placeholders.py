"""Placeholders of items in prompts: hidden where a text only spells one, counted, and grown to an item's number of tokens.

Texts of a request that spell a media token are not allowed to mean it: `hide` puts a random mark in each such place before the
chat template renders them, and `encode` makes the mark text again, tokenized as text. The template's own placeholders are left:
 one for each item, in order.
"""

import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import tokenizers

from quire.frontend.client.encoding import encode_marked
from quire.frontend.client.turns import in_native_thread
from quire.frontend.media.errors import MediaError
from quire.frontend.media.families import Family
from quire.frontend.text.tokenizer import Tokenizer

Pieces = Sequence[tuple[str, int]]  # a token's text, or "" for the placeholder, and how many


class Hidden(NamedTuple):
    """The marks of one request, by the tokens that they stand for; none if no text spells one."""

    marks: dict[str, str]

    def shown(self, text: str) -> str:
        for token, mark in self.marks.items():
            text = text.replace(mark, token)
        return text


def hide(value: Any, family: Family) -> tuple[Any, Hidden]:
    """JSON data with marks in the place of media tokens in all its texts, names of fields aside. It is not changed itself."""
    pattern = re.compile("|".join(map(re.escape, sorted(family.tokens, key=len, reverse=True))))
    marks: dict[str, str] = {}

    def mark(match: "re.Match[str]") -> str:
        return marks.setdefault(match[0], f"media{secrets.token_hex(16)}token")

    def walk(each: Any) -> Any:
        if isinstance(each, str):
            return pattern.sub(mark, each)
        if isinstance(each, list):
            return [walk(one) for one in each]
        if isinstance(each, dict):
            return {name: walk(one) for name, one in each.items()}
        return each

    try:
        return walk(value), Hidden(marks)
    except RecursionError:
        raise MediaError("messages: the JSON is nested too deeply", "messages") from None


async def encode(
    tokenizer: Tokenizer,
    family: Family,
    text: str,
    hidden: Hidden,
    add_special_tokens: bool,
    max_model_len: int,
    ends: Sequence[int] = (),
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of a rendered prompt, one for each placeholder, and its marks (`encode_marked`). Raises TooLong."""
    if not hidden.marks:
        text, ends = family.written(text, ends)
        return await encode_marked(tokenizer, text, add_special_tokens, max_model_len, ends)
    return await in_native_thread(encode_here, tokenizer, family, text, hidden, add_special_tokens), ()


def encode_here(tokenizer: Tokenizer, family: Family, text: str, hidden: Hidden, add_special_tokens: bool = False) -> list[int]:
    """The same at once, without marks and bounds."""
    text, _ = family.written(text)
    if not hidden.marks:
        return tokenizer.encode(text, add_special_tokens)
    ids: list[int] = []
    plain = _without(tokenizer.backend, family.tokens)
    for piece in re.split("(" + "|".join(map(re.escape, family.tokens)) + ")", text):
        if piece in family.tokens:
            ids.append(token_id(tokenizer, piece))
        elif piece:
            ids += plain.encode(hidden.shown(piece), add_special_tokens=add_special_tokens and not ids).ids
    return ids


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Raises MediaError if the tokenizer lacks the token."""
    found = tokenizer.backend.token_to_id(token)
    if found is None:
        raise MediaError(f"the model's tokenizer has no token {token}")
    return found


@lru_cache(maxsize=2)
def _without(backend: tokenizers.Tokenizer, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    """The tokenizer to which these tokens are text like any other."""
    settings = msgspec.json.decode(backend.to_str())
    settings["added_tokens"] = [each for each in settings["added_tokens"] if each["content"] not in tokens]
    return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(settings))


class Grown(NamedTuple):
    """ids: with as many placeholders as each item has embeddings. starts: the first of each item."""

    ids: list[int]
    starts: list[int]
    marks: tuple[int, ...]


def grow(tokenizer: Tokenizer, family: Family, ids: Sequence[int], items: Sequence[Pieces], marks: Sequence[int] = ()) -> Grown:
    """ids: with one placeholder for each item. items: what each becomes. marks: numbers of tokens, which grow, too.

    Raises MediaError if there is another number of placeholders.
    """
    place_of_item, placeholder = token_id(tokenizer, family.token), token_id(tokenizer, family.placeholder)
    found = [i for i, token in enumerate(ids) if token == place_of_item]
    if len(found) != len(items):
        raise MediaError(f"the prompt has {len(found)} places for images, and {len(items)} images come with it")
    grown: list[int] = []
    starts, counts, before = list[int](), list[int](), 0
    for place, pieces in zip(found, items, strict=True):
        grown += ids[before:place]
        starts.append(len(grown))
        for text, count in pieces:
            grown += [token_id(tokenizer, text) if text else placeholder] * count
        counts.append(len(grown) - starts[-1])
        before = place + 1
    grown += ids[before:]
    more = [sum(count - 1 for place, count in zip(found, counts, strict=True) if place < mark) for mark in marks]
    return Grown(grown, starts, tuple(mark + each for mark, each in zip(marks, more, strict=True)))
