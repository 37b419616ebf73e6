"""Which tokens a piece of a parsed output stands for: /v1/responses shows log-probabilities of a message's text alone.

Every character of an output is in one event (text/output_events.py), and a token's bytes say how far it reaches; so a token
belongs to the event that its first byte is in. Tokens that are not part of the text (the end of the sequence) belong to none.
"""

from collections import deque
from collections.abc import Sequence

from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list
from quire.frontend.http.api.bodies.logprobs import LogprobStyle, chat_logprobs
from quire.frontend.http.api.bodies.schemas import ChatLogprob
from quire.frontend.text.tokenizer import Tokenizer

TokenRow = tuple[Sequence[TokenLogprobDict], int, int]  # of one token: some rows, its place among them, its id
_ROWS = 64  # encoded at once: some 2 ms


class TokensOfText:
    """style: how they are shown. hidden_ids: special tokens that are not part of the text."""

    def __init__(self, tokenizer: Tokenizer, style: LogprobStyle, hidden_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._hidden_ids = hidden_ids
        self._waiting: deque[tuple[int, TokenRow]] = deque()  # each with the place of its first byte
        self._num_bytes = 0  # of tokens
        self._at = 0  # of events

    def add(self, delta: Delta) -> None:
        for i, token_id in enumerate(delta.token_ids):
            if delta.logprobs is not None and token_id not in self._hidden_ids:
                self._waiting.append((self._num_bytes, (delta.logprobs, i, token_id)))
                self._num_bytes += len(self._tokenizer.token_bytes(token_id))

    def take(self, source: str) -> list[TokenRow]:
        """The tokens of the next piece of the output. To be called for every piece."""
        self._at += len(source.encode())
        taken = []
        while self._waiting and self._waiting[0][0] < self._at:
            taken.append(self._waiting.popleft()[1])
        return taken

    def logprobs(self, tokens: Sequence[TokenRow]) -> list[ChatLogprob]:
        ids = [token_id for _, _, token_id in tokens]
        return chat_logprobs([rows[i] for rows, i, _ in tokens], ids, self._style).content

    def logprob_pieces(self, tokens: Sequence[TokenRow]) -> JsonPieces:
        """The same as JSON in pieces."""
        return JsonPieces(lambda: in_list(self.logprobs(tokens[i : i + _ROWS]) for i in range(0, len(tokens), _ROWS)))
