"""Finds the tokens of each event of a parsed output: /v1/responses shows log-probabilities of a message's text only.

Every character of an output is in one event (text/output_events.py), and a token's length in bytes is known; so a token belongs
to the event that contains its first byte. Tokens that are not part of the text (end of sequence) belong to none.
"""

from collections import deque
from collections.abc import Sequence

from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list
from quire.frontend.http.api.bodies.logprobs import LogprobStyle, chat_logprobs
from quire.frontend.http.api.bodies.schemas import ChatLogprob
from quire.frontend.text.tokenizer import Tokenizer

TokenRow = tuple[Sequence[TokenLogprobDict], int, int]  # a token: some rows, its index among them, its id
_ROWS = 64  # rows encoded at once: some 2 ms


class TokensOfText:
    """style: how tokens are shown. hidden_ids: special tokens that are not part of the text."""

    def __init__(self, tokenizer: Tokenizer, style: LogprobStyle, hidden_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._hidden_ids = hidden_ids
        self._waiting: deque[tuple[int, TokenRow]] = deque()  # tokens with the offset of their first byte
        self._num_bytes = 0  # of all tokens added
        self._at = 0  # bytes of all events taken

    def add(self, delta: Delta) -> None:
        for i, token_id in enumerate(delta.token_ids):
            if delta.logprobs is not None and token_id not in self._hidden_ids:
                self._waiting.append((self._num_bytes, (delta.logprobs, i, token_id)))
                self._num_bytes += len(self._tokenizer.token_bytes(token_id))

    def take(self, source: str) -> list[TokenRow]:
        """The tokens of the output's next event, with this text. To be called for every event."""
        self._at += len(source.encode())
        taken = []
        while self._waiting and self._waiting[0][0] < self._at:
            taken.append(self._waiting.popleft()[1])
        return taken

    def logprobs(self, tokens: Sequence[TokenRow]) -> list[ChatLogprob]:
        ids = [token_id for _, _, token_id in tokens]
        return chat_logprobs([rows[i] for rows, i, _ in tokens], ids, self._style).content

    def logprob_pieces(self, tokens: Sequence[TokenRow]) -> JsonPieces:
        """As `logprobs`, as JSON in pieces."""
        return JsonPieces(lambda: in_list(self.logprobs(tokens[i : i + _ROWS]) for i in range(0, len(tokens), _ROWS)))
