"""Log-probabilities in OpenAI's two shapes (chat and completions) and in vLLM's (prompt_logprobs).

A row is a TokenLogprobDict of one position (client/outputs.py): token id -> Logprob, first the token at that position, then the
most likely ones. JSON has no infinity: log-probabilities of impossible tokens are sent as -9999.0, as vLLM does.
"""

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import cast

from quire.frontend.client.outputs import TokenLogprobDict
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list
from quire.frontend.http.api.bodies.schemas import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TopLogprob,
)
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.text.tokenizer import Tokenizer

# rows, token ids, and, for a prompt's rows, the text as it was sent
RowsOfTokens = tuple[Sequence[TokenLogprobDict | None], Sequence[int], str | None]

IMPOSSIBLE = -9999.0
_ROWS = 64  # rows encoded at once: some 2 ms


class LogprobStyle:
    """How a request's tokens are shown: the number of alternatives, and tokens as text or as "token_id:N"."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, as_token_ids: bool = False, skip_special: bool = True) -> None:
        self.num_top = num_top
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._silent_ids = tokenizer.special_ids if skip_special else frozenset[int]()

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_str(token_id)

    def offsets(self, start: int = 0, text: str | None = None) -> "TextOffsets":
        """The offsets of an answer that begins at `start`, or of a prompt that was sent as this text."""
        if text is None:
            return TextOffsets(self._tokenizer, self._silent_ids, start)
        return PromptOffsets(self._tokenizer, text)

    def token_bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Where tokens, given in order, begin in a text, in characters. A token within a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer, silent_ids: frozenset[int], start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._piece(token_id)))
        return offset

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent_ids else self._tokenizer.token_bytes(token_id)


class PromptOffsets(TextOffsets):
    """Offsets in a prompt as it was sent: it contains some special tokens and lacks others, and lacks the space that some
    tokenizers add at its beginning."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(tokenizer, tokenizer.special_ids)
        self._text, self._at = text.encode(), 0

    def _piece(self, token_id: int) -> bytes:
        piece = self._tokenizer.token_bytes(token_id)
        if not self._text.startswith(piece, self._at):
            if token_id in self._silent_ids:
                piece = b""
            elif piece.startswith(b" ") and self._text.startswith(piece[1:], self._at):
                piece = piece[1:]
        self._at += len(piece)
        return piece


def chat_logprobs(rows: Sequence[TokenLogprobDict], token_ids: Sequence[int], style: LogprobStyle) -> ChatLogprobs:
    content = []
    for row, token_id in zip(rows, token_ids, strict=True):
        top = [TopLogprob(style.token(i), finite(p), style.token_bytes(i)) for i, p in _top(row, style.num_top)]
        content.append(ChatLogprob(style.token(token_id), finite(row[token_id].logprob), style.token_bytes(token_id), top))
    return ChatLogprobs(content)


def chat_pieces(rows: Sequence[TokenLogprobDict], token_ids: Sequence[int], style: LogprobStyle) -> ChatLogprobs:
    """As `chat_logprobs`, as JSON in pieces (json_pieces.py), for answers of any length."""

    def make() -> Iterator[bytes]:
        yield b'{"content":'
        parts = (slice(i, i + _ROWS) for i in range(0, len(token_ids), _ROWS))
        yield from in_list(chat_logprobs(rows[part], token_ids[part], style).content for part in parts)
        yield b"}"

    return cast(ChatLogprobs, JsonPieces(make))


def add_completion_logprobs(
    to: CompletionLogprobs,
    rows: Sequence[TokenLogprobDict | None],
    token_ids: Sequence[int],
    style: LogprobStyle,
    offsets: TextOffsets,
) -> None:
    """Append rows. The row of the prompt's first token is None and has no numbers."""
    for row, token_id in zip(rows, token_ids, strict=True):
        to.tokens.append(style.token(token_id))
        to.text_offset.append(offsets.next(token_id))
        if row is None:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            continue
        to.token_logprobs.append(finite(row[token_id].logprob))
        top: dict[str, float] = {}
        for i, logprob in [*_top(row, style.num_top), (token_id, row[token_id].logprob)]:
            top.setdefault(style.token(i), finite(logprob))  # two ids may have the same text: the likelier one counts
        to.top_logprobs.append(top)


def completion_pieces(parts: Sequence[RowsOfTokens], style: LogprobStyle) -> CompletionLogprobs:
    """Logprobs of the rows and tokens of all `parts`, in order, as JSON in pieces."""

    def make() -> Iterator[bytes]:
        columns: dict[str, list[bytes]] = {"text_offset": [], "token_logprobs": [], "tokens": []}  # small
        yield b'{"top_logprobs":'
        yield from in_list(_top_logprobs(parts, style, columns))
        for name, encoded in columns.items():
            yield b',"%b":[' % name.encode()
            for i, data in enumerate(encoded):
                yield b"," + data if i else data
            yield b"]"
        yield b"}"

    return cast(CompletionLogprobs, JsonPieces(make))


def _top_logprobs(
    parts: Sequence[RowsOfTokens], style: LogprobStyle, columns: dict[str, list[bytes]]
) -> Iterator[list[dict[str, float] | None]]:
    start = 0
    for rows, token_ids, text in parts:
        offsets = style.offsets(start, text)
        for i in range(0, len(token_ids), _ROWS):
            some, part = CompletionLogprobs([], [], [], []), slice(i, i + _ROWS)
            add_completion_logprobs(some, rows[part], token_ids[part], style, offsets)
            for name, encoded in columns.items():
                encoded.append(json_bytes(getattr(some, name))[1:-1])
            yield some.top_logprobs
        start = len(text or "")


def prompt_logprobs(rows: Sequence[TokenLogprobDict | None] | None) -> PromptLogprobList | None:
    """vLLM's prompt_logprobs as JSON in pieces."""
    if rows is None:
        return None

    def some(start: int) -> PromptLogprobList:
        return [
            None if row is None else {i: PromptLogprob(finite(p.logprob), p.rank, p.decoded_token) for i, p in row.items()}
            for row in rows[start : start + _ROWS]
        ]

    return cast(PromptLogprobList, JsonPieces(lambda: in_list(some(start) for start in range(0, len(rows), _ROWS))))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _top(row: TokenLogprobDict, num_top: int) -> list[tuple[int, float]]:
    """The most likely tokens of a row, most likely first. The position's own token is included only if it is one of them."""
    best = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
    return [(token_id, p.logprob) for token_id, p in best if p.rank <= num_top]
