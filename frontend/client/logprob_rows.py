"""Log-probabilities: kept as they arrived, and converted to vLLM's dicts on access, one position at a time.

A row of 20 alternatives takes a hundred Python objects and 10 us; a request may have a million rows. So rows stay packed until
they are read, and dicts are not kept. Made by stream.py; read by the HTTP routes and, as lists, by Python clients.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import overload

import numpy as np

from quire.frontend.client.outputs import Logprob, TokenLogprobDict
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import PromptLogprobs, TokenLogprobs


class LogprobRows(Sequence[TokenLogprobDict]):
    """One row for each of a range of output tokens."""

    __slots__ = ("_rows", "_token_ids", "_tokenizer")

    def __init__(self, token_ids: list[int], rows: list[TokenLogprobs], tokenizer: Tokenizer | None) -> None:
        self._token_ids, self._rows, self._tokenizer = token_ids, rows, tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def total(self) -> float:
        """Sum of the tokens' own log-probabilities."""
        return sum([row.logprob for row in self._rows])

    @overload
    def __getitem__(self, index: int) -> TokenLogprobDict: ...
    @overload
    def __getitem__(self, index: slice) -> "LogprobRows": ...
    def __getitem__(self, index: int | slice) -> "TokenLogprobDict | LogprobRows":
        if isinstance(index, slice):
            return LogprobRows(self._token_ids[index], self._rows[index], self._tokenizer)
        row = self._rows[index]
        top_ids, top = np.frombuffer(row.top_ids, "<i4").tolist(), np.frombuffer(row.top_logprobs, "<f4").tolist()
        return _logprob_dict(self._token_ids[index], row.logprob, row.rank, top_ids, top, self._tokenizer)


class PromptLogprobRows(Sequence[TokenLogprobDict | None]):
    """One row for each of a prompt's tokens; None for the first, and for rows that have not arrived."""

    __slots__ = ("_messages", "_starts", "_token_ids", "_tokenizer")

    def __init__(self, token_ids: list[int], messages: list[PromptLogprobs], tokenizer: Tokenizer | None) -> None:
        self._token_ids, self._tokenizer = token_ids, tokenizer
        self._messages = sorted(messages, key=lambda m: m.start)
        self._starts = [m.start for m in self._messages]

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobDict | None: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[TokenLogprobDict | None]": ...
    def __getitem__(self, index: int | slice) -> "TokenLogprobDict | Sequence[TokenLogprobDict | None] | None":
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        message = self._messages[max(0, bisect_right(self._starts, at) - 1)] if self._messages else None
        if message is None or not 0 <= (i := at - message.start) < len(message.ranks) // 4:
            return None
        logprob, rank = _at(message.logprobs, "<f4", i, 1), _at(message.ranks, "<i4", i, 1)
        top_ids, top = _at(message.top_ids, "<i4", i, message.num_top), _at(message.top_logprobs, "<f4", i, message.num_top)
        return _logprob_dict(self._token_ids[at], logprob[0], rank[0], top_ids, top, self._tokenizer)


def _at(data: bytes, dtype: str, row: int, width: int) -> list:
    return np.frombuffer(data, dtype, width, 4 * row * width).tolist() if width else []


def _logprob_dict(
    token_id: int, logprob: float, rank: int, top_ids: list[int], top: list[float], tokenizer: Tokenizer | None
) -> TokenLogprobDict:
    text = tokenizer.token_str if tokenizer is not None else str
    found = {token_id: Logprob(logprob, rank, text(token_id))}
    for place, (i, value) in enumerate(zip(top_ids, top, strict=True), 1):
        if i != token_id:
            found[i] = Logprob(value, place, text(i))
    return found
