"""PromptRun: one prompt of an HTTP request on its way: its stream, its place among the choices, its counts.

Made by the routes when they submit a prompt, filled in while its stream is read (generate.py), read for usage, metrics and the
log of requests. It knows neither the connection nor the answer's shape.
"""

from collections.abc import Callable, Sequence

import msgspec

from quire.frontend.client.beam_search import BeamStream
from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.bodies.schemas import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.ipc.messages.frontend import FinishReason
from quire.ipc.sampling import SamplingParams


class PromptRun:
    """One prompt of a request. first_choice: index of its first child among the response's choices.

    choose: of all that the stream has generated the params.n that are returned, numbered anew; None: all.
    """

    __slots__ = ("_choose", "_prompt_logprobs", "finish_reasons", "first_choice", "has_begun", "num_reasoning_tokens",
                 "num_tokens", "num_tokens_left_out", "params", "prompt_token_ids", "stream")  # fmt: skip

    def __init__(
        self,
        stream: Stream | BeamStream,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        first_choice: int,
        choose: Callable[[list[Delta]], list[Delta]] | None = None,
    ) -> None:
        self.stream = stream
        self._choose = choose
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.first_choice = first_choice
        self.num_tokens = [0] * params.n  # output tokens by child
        self.num_tokens_left_out = 0  # generated and not returned
        self.num_reasoning_tokens: list[int] | None = None  # of them, those of thoughts, where that is known
        self.finish_reasons: list[FinishReason | None] = [None] * params.n
        self.has_begun = False  # its first token was counted
        self._prompt_logprobs: Sequence[TokenLogprobDict | None] | None = None

    async def collect(self) -> list[Delta]:
        """A merged Delta for each choice, when all have ended."""
        deltas = await self.stream.collect()
        if self._choose is None:
            return deltas
        chosen = self._choose(deltas)
        self.num_tokens_left_out = sum(d.num_tokens for d in deltas) - sum(d.num_tokens for d in chosen)
        return chosen

    def prompt_logprobs(self) -> Sequence[TokenLogprobDict | None] | None:
        """Once the first output is there."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self.stream.prompt_logprobs
        return self._prompt_logprobs


def usage_of(runs: Sequence[PromptRun]) -> Usage:
    if len(runs) == 1 and runs[0].num_reasoning_tokens is None:  # most requests: a third of the time
        run = runs[0]
        prompt, completion = run.stream.num_prompt_tokens, sum(run.num_tokens) + run.num_tokens_left_out
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(run.stream.num_cached_tokens or 0))
    prompt = sum(run.stream.num_prompt_tokens for run in runs)
    completion = sum(sum(run.num_tokens) + run.num_tokens_left_out for run in runs)
    cached = sum(run.stream.num_cached_tokens or 0 for run in runs)
    thoughts = [run.num_reasoning_tokens for run in runs if run.num_reasoning_tokens is not None]
    details = CompletionTokensDetails(sum(map(sum, thoughts))) if thoughts else msgspec.UNSET
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


class RunningUsage:
    """usage_of many prompts while their stream goes on: what a chunk says must not cost a look at thousands of sequences."""

    __slots__ = ("_num_cached", "_num_prompt", "num_tokens")

    def __init__(self, runs: Sequence[PromptRun]) -> None:
        self._num_prompt = sum(run.stream.num_prompt_tokens for run in runs)
        self._num_cached = 0
        self.num_tokens = 0  # of output, of all runs; counted by whoever reads them

    def started(self, run: PromptRun) -> None:
        self._num_cached += run.stream.num_cached_tokens or 0

    def now(self) -> Usage:
        total = self._num_prompt + self.num_tokens
        return Usage(self._num_prompt, self.num_tokens, total, PromptTokensDetails(self._num_cached))
