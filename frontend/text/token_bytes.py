"""The bytes that each token adds to a text, for decoders that join tokens one by one.

Most tokenizers decode locally: the text is the concatenation of pieces, each of which depends only on its token and on whether
it is the first. That holds for byte-level BPE, for SentencePiece models as converted to tokenizer.json (Replace or Metaspace,
ByteFallback, Fuse, Strip), for WordPiece, and without a decoder (words joined with spaces). `Pieces` tells whether a tokenizer
is of that kind, and computes pieces on demand by asking the real decoder about one token; detokenizing then is a table look-up.
For other decoders `local` is False and only `Tokenizer`'s slow paths are used.
"""

import json
import re
from collections.abc import Callable

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable(dict[int, bytes]):
    """Token id -> piece, computed at first use. A known id costs one dict look-up."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


class Pieces:
    """Pieces of a tokenizer's tokens. Ids without a token (padding of the model's vocabulary) have an empty piece.

    local: whether pieces describe the decoder; if not, `all` and `visible` hold each token decoded on its own.
    all: every token's piece after another token; visible: the same with special tokens empty. first(id): its piece at the
    start of a text. first_differs: whether there is a difference. byte_fallback: bytes come as <0xXX> tokens of their own,
    and each byte that is not UTF-8 decodes to a replacement character. joined: words are joined with spaces.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        steps = _decoder_steps(backend)
        names = [str(step["type"]) for step in steps]
        self.byte_level = bool(steps) and set(names) <= {"ByteLevel", "Fuse"} and "ByteLevel" in names
        self.joined = names in ([], ["WordPiece"])
        self.local = self.byte_level or self.joined or _is_sentencepiece_like(steps)
        self.byte_fallback = "ByteFallback" in names
        self.first_differs = self.local and not self.byte_level
        self.all = PieceTable(self._next)
        self.visible = PieceTable(lambda i: b"" if i in special_ids else self.all[i])
        self._special_ids = special_ids
        self._visible_with: dict[frozenset[int], PieceTable] = {}

    def visible_with(self, shown: frozenset[int]) -> PieceTable:
        """`visible`, except that these special tokens are not empty. There is one table for each of a server's few sets."""
        if not shown & self._special_ids:
            return self.visible
        if shown not in self._visible_with:
            hidden = self._special_ids - shown
            self._visible_with[shown] = PieceTable(lambda i: b"" if i in hidden else self.all[i])
        return self._visible_with[shown]

    def _next(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return _byte_level_bytes(token)
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if not self.local:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._decode(["a", token])[1:].encode()

    def first(self, token_id: int) -> bytes:
        """The piece at the start of a text, without the space that separates it from a token before."""
        token = self._backend.id_to_token(token_id)
        if token is None or self.byte_level or not self.local:
            return self.all[token_id]
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)) and byte[1] != "20":
            return bytes.fromhex(byte[1])
        return self._decode([token]).encode()

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict]:
    """The decoder's configuration, as a flat list of steps."""
    if backend.decoder is None:
        return []
    todo, steps = [json.loads(backend.decoder.__getstate__())], []
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step["decoders"] + todo
        else:
            steps.append(step)
    return steps


def _is_sentencepiece_like(steps: list[dict]) -> bool:
    """Whether steps are (Replace | Metaspace)* ByteFallback? Fuse? Strip?, and Strip removes at most one leading character."""
    order = {"Replace": 0, "Metaspace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    ranks = [order.get(step["type"], -1) for step in steps]
    if not steps or -1 in ranks or ranks != sorted(ranks) or len([r for r in ranks if r]) != len({r for r in ranks if r}):
        return False
    if steps[-1]["type"] != "Strip":
        return True
    return 2 in ranks and steps[-1]["start"] <= 1 and steps[-1]["stop"] == 0


def _byte_of_char() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, inverted. Printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes. A token with a character outside the map (an added token) is its own text."""
    try:
        return bytes([BYTE_OF_CHAR[c] for c in token])
    except KeyError:
        return token.encode()
