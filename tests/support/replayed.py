"""A client with real streams that have arrived completely, to test how large answers are handled."""

import fake_client as http
import msgspec
import numpy as np

from quire.frontend.client.stream import RequestState, Stream
from quire.ipc.messages.frontend import PromptLogprobs, TokenLogprobs


class Replayed(http.FakeClient):
    """num_tokens: for each of n children, with logprobs."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.welcome = msgspec.structs.replace(
            self.welcome, limits=msgspec.structs.replace(self.welcome.limits, max_model_len=1 << 20)
        )

    def submit(self, prompt_token_ids, params, **options):
        ids = np.array(prompt_token_ids, np.int32)
        state = RequestState(1, "", ids, params, self.tokenizer, 0.0)
        top = np.arange(20, dtype="<i4").tobytes(), np.full(20, -1.5, "<f4").tobytes()
        if params.prompt_logprobs is not None:
            n, count = params.prompt_logprobs, len(ids) - 1
            packed = np.full(count, -2.0, "<f4").tobytes(), np.ones(count, "<i4").tobytes()
            tops = np.tile(np.arange(n, dtype="<i4"), count).tobytes(), np.full(n * count, -3.0, "<f4").tobytes()
            state.add_prompt_logprobs(PromptLogprobs(1, 1, 1, n, *packed, *tops))
        for sequence in state.sequences:
            sequence.ids = [100 + i % 100 for i in range(self._num_tokens)]
            if sequence.logprobs is not None:
                sequence.logprobs = [TokenLogprobs(-0.5, 1, *top) for _ in range(self._num_tokens)]
            state.end(sequence, "length", None, None)
        self.streams.append(Stream(state, lambda _: None))
        return self.streams[-1]
