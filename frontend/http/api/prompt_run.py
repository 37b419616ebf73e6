"""PromptRun: one prompt of an HTTP request on its way: its stream, its place among the choices, its counts.

Made by the routes when they submit a prompt, filled in while its stream is read (generate.py), read for usage, metrics and the
log of requests. It knows neither the connection nor the answer's shape.
"""

from collections.abc import Sequence

import msgspec

from quire.frontend.client.outputs import TokenLogprobDict
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.schemas import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.ipc.messages import FinishReason
from quire.ipc.sampling import SamplingParams


class PromptRun:
    """One prompt of a request. first_choice: index of its first child among the response's choices."""

    __slots__ = ("_prompt_logprobs", "finish_reasons", "first_choice", "num_reasoning_tokens", "num_tokens", "params",
                 "prompt_token_ids", "stream")  # fmt: skip

    def __init__(self, stream: Stream, params: SamplingParams, prompt_token_ids: Sequence[int], first_choice: int) -> None:
        self.stream = stream
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.first_choice = first_choice
        self.num_tokens = [0] * params.n  # output tokens by child
        self.num_reasoning_tokens: list[int] | None = None  # of them, those of thoughts, where that is known
        self.finish_reasons: list[FinishReason | None] = [None] * params.n
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = None

    def prompt_logprobs(self) -> list[TokenLogprobDict | None] | None:
        """Once the first output is there. The stream builds them at each access: kept."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self.stream.prompt_logprobs
        return self._prompt_logprobs


def usage_of(runs: Sequence[PromptRun]) -> Usage:
    prompt = sum(run.stream.num_prompt_tokens for run in runs)
    completion = sum(sum(run.num_tokens) for run in runs)
    cached = sum(run.stream.num_cached_tokens or 0 for run in runs)
    thoughts = [run.num_reasoning_tokens for run in runs if run.num_reasoning_tokens is not None]
    details = CompletionTokensDetails(sum(map(sum, thoughts))) if thoughts else msgspec.UNSET
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)
