"""Log-probabilities in OpenAI's two shapes (chat and completions) and in vLLM's (prompt_logprobs).

A row is what outputs.py hands out for one position: token id -> Logprob, the token that stands there first, then the most
likely ones. JSON has no infinity: log-probabilities of impossible tokens are sent as -9999.0, as vLLM does.
"""

import math
from collections.abc import Sequence

from quire.frontend.client.outputs import TokenLogprobDict
from quire.frontend.http.api.schemas import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TopLogprob,
)
from quire.frontend.text.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


class LogprobStyle:
    """How one request wants its tokens shown: how many alternatives, and tokens as text or as "token_id:N"."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, as_token_ids: bool = False, skip_special: bool = True) -> None:
        self.num_top = num_top
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._silent_ids = tokenizer.special_ids if skip_special else frozenset[int]()

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_str(token_id)

    def num_characters(self, token_id: int) -> int:
        """What the token adds to the text; for text offsets."""
        return 0 if token_id in self._silent_ids else len(self._tokenizer.token_str(token_id))

    def token_bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(rows: Sequence[TokenLogprobDict], token_ids: Sequence[int], style: LogprobStyle) -> ChatLogprobs:
    content = []
    for row, token_id in zip(rows, token_ids, strict=True):
        top = [TopLogprob(style.token(i), finite(p), style.token_bytes(i)) for i, p in _top(row, style.num_top)]
        content.append(ChatLogprob(style.token(token_id), finite(row[token_id].logprob), style.token_bytes(token_id), top))
    return ChatLogprobs(content)


def add_completion_logprobs(
    to: CompletionLogprobs,
    rows: Sequence[TokenLogprobDict | None],
    token_ids: Sequence[int],
    style: LogprobStyle,
    text_offset: int,
) -> int:
    """Append these positions; returns the offset behind them. A row of None (the prompt's first token) has no numbers."""
    for row, token_id in zip(rows, token_ids, strict=True):
        to.tokens.append(style.token(token_id))
        to.text_offset.append(text_offset)
        text_offset += style.num_characters(token_id)
        if row is None:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            continue
        to.token_logprobs.append(finite(row[token_id].logprob))
        top: dict[str, float] = {}
        for i, logprob in [*_top(row, style.num_top), (token_id, row[token_id].logprob)]:
            top.setdefault(style.token(i), finite(logprob))  # two ids may read the same: the likelier one counts
        to.top_logprobs.append(top)
    return text_offset


def prompt_logprobs(rows: Sequence[TokenLogprobDict | None] | None) -> PromptLogprobList | None:
    if rows is None:
        return None
    return [
        None if row is None else {i: PromptLogprob(finite(p.logprob), p.rank, p.decoded_token) for i, p in row.items()}
        for row in rows
    ]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _top(row: TokenLogprobDict, num_top: int) -> list[tuple[int, float]]:
    """The most likely tokens of a row, most likely first; the token that stands there only if it is one of them."""
    best = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
    return [(token_id, p.logprob) for token_id, p in best if p.rank <= num_top]
