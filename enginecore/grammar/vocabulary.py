"""Vocabulary: the bytes that each token id adds to a text, in the form that llguidance wants, made from a tokenizer.json.

llguidance's own reader of tokenizer.json is not used: it takes twice the time and memory, does not support gaps in the ids,
and needs an end-of-sequence id within the vocabulary. Here the end of a grammar is an id of its own behind the model's
vocabulary. The tokens of the model that stand for it are chosen for each sequence (matchers.py), and a model may have none.

Used by the core and by the process that tries grammars (trial.py). A vocabulary of 152k tokens takes 100 MB, and 0.5 s in which
no other thread can run Python; so the core makes it while its workers load the model.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPECIAL = b"\xff"  # marks special tokens for llguidance: no text has this byte
END = b"the end of the grammar"
# Sets of tokens that llguidance can allow as a whole: white space, and up to n characters of a JSON string. Its own lengths are
# 10 and 30: with these a mask near a string's maxLength took 0.17 to 0.74 ms; with the lengths here it takes half of that.
_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_STRING}{{1,{n}}}" for n in (6, 8, 10, 14, 20, 30)), f"{_STRING}+"]


class VocabularyError(Exception):
    """The text is for a user who asked for structured output."""


class Vocabulary(NamedTuple):
    tokenizer: llguidance.LLTokenizer
    end_id: int  # of END, the first id behind the model's vocabulary
    known: np.ndarray  # int32 [words], bits of the ids that are tokens
    special: frozenset[int]
    special_names: dict[str, int]  # to ids; without tokens that end an output, which a grammar cannot ask for

    @property
    def num_words(self) -> int:
        """int32 words of a mask, including the bit of the end."""
        return len(self.known)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerJson(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class _Tokens:
    """A tokenizer as llguidance expects it. It is never asked to tokenize, because all grammars say no_forcing (texts.py)."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], end_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("grammars leave the choice of tokens to the model")


def make_vocabulary(tokenizer_json: bytes, vocab_size: int, eos_token_ids: Collection[int] = ()) -> Vocabulary:
    """vocab_size, eos_token_ids: the model's. Raises VocabularyError if the tokenizer's tokens are not pieces of a text."""
    try:
        parsed = msgspec.json.decode(tokenizer_json, type=_TokenizerJson)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise VocabularyError(f"structured output is not available: the tokenizer cannot be read: {error}") from None
    tokens = [b""] * (vocab_size + 1)
    vocab = parsed.model.vocab
    ids = vocab.items() if isinstance(vocab, dict) else ((name, i) for i, (name, _) in enumerate(vocab))
    piece = _piece_of(parsed.decoder)
    for name, i in ids:
        if 0 <= i < vocab_size:
            tokens[i] = piece(name)
    for added in parsed.added_tokens:
        if 0 <= added.id < vocab_size:
            tokens[added.id] = SPECIAL * added.special + added.content.encode()
    known = np.packbits([bool(t) for t in tokens] + [False] * (-len(tokens) % 32), bitorder="little").view(np.int32)
    tokens[vocab_size] = SPECIAL + END
    special = [added for added in parsed.added_tokens if added.special and added.id < vocab_size]
    tokenizer = llguidance.LLTokenizer(_Tokens(tokens, vocab_size), slices=SLICES)  # type: ignore[arg-type]
    names = {added.content: added.id for added in special if added.id not in eos_token_ids and added.content}
    return Vocabulary(tokenizer, vocab_size, known, frozenset(added.id for added in special), names)


# ------------------------------------------------------------------------------------------------------------ pieces
def _piece_of(decoder: dict[str, Any] | None) -> Any:
    """The function that turns a token's name in tokenizer.json into its bytes."""
    steps = _steps(decoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level_piece
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        spaces = [s for s in (_space_of(step) for step in steps) if s]
        return lambda name: _sentencepiece_piece(name, spaces)
    raise VocabularyError(
        "structured output is not available for this model's tokenizer: its tokens are not pieces of a text "
        "(byte-level and SentencePiece tokenizers are)"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _steps(part)]
    return [decoder]


def _space_of(step: dict[str, Any]) -> str:
    """The text that stands for a space, if this step of a decoder replaces one; else ""."""
    if step.get("type") == "Metaspace":
        return str(step.get("replacement", "▁"))
    if step.get("type") == "Replace" and step.get("content") == " ":
        return str(step.get("pattern", {}).get("String", ""))
    return ""


def _sentencepiece_piece(name: str, spaces: list[str]) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(byte[1])
    for space in spaces:
        name = name.replace(space, " ")
    return name.encode(errors="replace")


def _byte_level_piece(name: str) -> bytes:
    try:
        return name.translate(_LATIN1_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError:  # not made of bytes: it stands for itself
        return name.encode(errors="replace")


def _latin1_of_char() -> dict[int, int]:
    """GPT-2's map of bytes to printable characters, inverted: printable bytes stand for themselves, others follow 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {256 + i: b for i, b in enumerate(others)}


_LATIN1_OF_CHAR = _latin1_of_char()
