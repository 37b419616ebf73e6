"""OutputSequence: one child of a request, from arriving tokens to the Deltas that the consumer takes (stream.py)."""

from array import array
from typing import Any

from quire.frontend.client.logprob_rows import LogprobRows
from quire.frontend.client.outputs import Delta
from quire.frontend.text.detokenizer import OutputText
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import FinishReason, TokenLogprobs, sequence_key


class OutputSequence:
    """One child: tokens not taken yet, and the text decoder. Arriving tokens are appended directly to `ids`."""

    __slots__ = ("_seen", "_taken", "_text", "eager", "finish_reason", "ids", "index", "key", "logprobs",
                 "plain", "request", "stop_reason", "stop_token", "text")  # fmt: skip

    def __init__(self, request: Any, index: int, text: OutputText | None) -> None:
        """request: its RequestState, which sets this to None when the child has ended."""
        self.request = request
        self.index = index
        self.key = sequence_key(request.id, index)
        self.text = text
        self.eager = text is not None and bool(request.params.stop)  # decoded on arrival
        self.plain = not self.eager and request.params.logprobs is None  # on arrival, only the token is kept
        # not taken yet
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._seen = 0  # how many of ids are decoded
        self._text = ""  # the text of those
        # end
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stop_token = False
        self._taken = array("i")  # ids that were taken: kept, as an engine that goes on with this sequence needs them

    @property
    def num_tokens(self) -> int:
        return len(self._taken) + len(self.ids)

    def output_ids(self) -> bytes:
        """All ids so far, int32."""
        return self._taken.tobytes() + array("i", self.ids).tobytes()

    def decode(self) -> None:
        """Decode the new ids. A stop string ends the sequence here, even if it still runs in the core."""
        if self.text is None:
            return
        new = self.ids[self._seen :] if self._seen else self.ids
        self._text += self.text.push(new, self.finish_reason is not None, self.stop_token)
        self._seen = len(self.ids)
        if self.text.stop_string is not None:
            kept = self.text.kept_tokens - len(self._taken)
            del self.ids[kept:]
            if self.logprobs is not None:
                del self.logprobs[kept:]
            self._seen = kept
            self.finish_reason, self.stop_reason = "stop", self.text.stop_string

    def decode_some(self, most: int) -> bool:
        """Decode at most `most` of the new ids, ahead of `take`. Returns whether there are more, the last one not counted."""
        if self.text is None or self.eager:
            return False
        new = self.ids[self._seen : min(self._seen + most, len(self.ids) - 1)]
        self._text += self.text.push(new)
        self._seen += len(new)
        return self._seen < len(self.ids) - 1

    def take(self, tokenizer: Tokenizer | None) -> Delta:
        """Everything new, as one Delta, which is then forgotten."""
        ids = self.ids
        if self.plain and not self._seen and self.text is not None:  # as below, but faster
            text = self.text.push(ids, self.finish_reason is not None, self.stop_token)
        else:
            if not self.eager:
                self.decode()
            ids, text = self.ids, self._text
            self._text, self._seen = "", 0
        self.ids = []
        self._taken.fromlist(ids)
        logprobs = None
        if self.logprobs is not None:
            logprobs, self.logprobs = LogprobRows(ids, self.logprobs, tokenizer), []
        return Delta(self.index, text, ids, logprobs, self.finish_reason, self.stop_reason, len(self._taken))

    def take_some(self, tokenizer: Tokenizer | None, most: int) -> Delta:
        """The first `most` of more new tokens, as one Delta; with stop strings, it has all decoded text."""
        later, self.ids = self.ids[most:], self.ids[:most]
        if self.eager or self.text is None:
            seen = self._seen
        else:
            new = self.ids[self._seen :]
            self._text += self.text.push(new)
            seen = self._seen + len(new)
        ids, text = self.ids, self._text
        self.ids, self._text, self._seen = later, "", max(0, seen - most)
        self._taken.fromlist(ids)
        logprobs = None
        if self.logprobs is not None:
            logprobs, self.logprobs = LogprobRows(ids, self.logprobs[:most], tokenizer), self.logprobs[most:]
        return Delta(self.index, text, ids, logprobs, num_tokens=len(self._taken))
