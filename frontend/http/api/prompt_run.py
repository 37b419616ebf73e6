"""PromptRun: one submitted prompt of an HTTP request: its stream, its place among the choices, its counts.

`submit` makes one: a plain request, the best of several completions, or a beam search. Its counts are filled in while its
stream is read (generate.py); usage, metrics, traces and the log of requests read them. It knows neither the connection nor the
answer's shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.frontend.client.beam_search import BeamSearch, BeamStream
from quire.frontend.client.client import Client
from quire.frontend.client.logprob_rows import LogprobRows
from quire.frontend.client.media import PlacedItem, num_tokens
from quire.frontend.client.outputs import Delta, TokenLogprobDict
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.bodies.checked import CheckedRequest
from quire.frontend.http.api.bodies.fields import beam_search_params
from quire.frontend.http.api.bodies.schemas import CompletionTokensDetails, PromptTokensDetails, SamplingFields, Usage
from quire.frontend.http.api.errors import invalid
from quire.ipc.limits import output_limit, output_room
from quire.ipc.messages.frontend import FinishReason
from quire.ipc.sampling import SamplingParams


class PromptRun:
    """One prompt of a request. params: as submitted. first_choice: index of its first child among the choices.

    n: how many choices it has. They are the stream's children, unless `choose` picks and renumbers some of them.
    num_logprobs: alternatives returned beside each token; None for no log-probabilities.
    """

    __slots__ = ("_choose", "_prompt_logprobs", "finish_reasons", "first_choice", "has_begun", "max_tokens", "n",
                 "num_logprobs", "num_reasoning_tokens", "num_tokens", "num_tokens_left_out", "params", "prompt_token_ids",
                 "stream")  # fmt: skip

    def __init__(
        self,
        stream: Stream | BeamStream,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        first_choice: int = 0,
        choose: Callable[[list[Delta]], list[Delta]] | None = None,
        checked: CheckedRequest | None = None,
    ) -> None:
        """checked: None if everything that is generated is returned."""
        self.stream = stream
        self._choose = choose
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.first_choice = first_choice
        self.n, self.num_logprobs = (params.n, params.logprobs) if checked is None else (checked.n, checked.num_logprobs)
        self.max_tokens = params.max_tokens  # for metrics and traces
        self.num_tokens = [0] * self.n  # output tokens by child
        self.num_tokens_left_out = 0  # generated and not returned
        self.num_reasoning_tokens: list[int] | None = None  # by child; None where it is not known
        self.finish_reasons: list[FinishReason | None] = [None] * self.n
        self.has_begun = False  # its first token was counted
        self._prompt_logprobs: Sequence[TokenLogprobDict | None] | None = None

    async def collect(self) -> list[Delta]:
        """Wait for the end; one merged Delta for each choice."""
        deltas = await self.stream.collect()
        if self._choose is None:
            return deltas
        chosen = self._choose(deltas)
        self.num_tokens_left_out = sum(d.num_tokens for d in deltas) - sum(d.num_tokens for d in chosen)
        return chosen

    def prompt_logprobs(self) -> Sequence[TokenLogprobDict | None] | None:
        """Log-probabilities of the prompt's tokens; to be called when the first output is there."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self.stream.prompt_logprobs
        return self._prompt_logprobs


def submit(
    client: Client,
    body: SamplingFields,
    ids: Sequence[int],
    params: SamplingParams,
    checked: CheckedRequest,
    name: str,
    first_choice: int = 0,
    marks: Sequence[int] = (),
    items: Sequence[PlacedItem] = (),
) -> PromptRun:
    """Send a prompt to the engine. checked: the request that params were made of. marks: as in TokenInputs. items: its media.

    Raises ClientErrors."""
    options: dict[str, Any] = {"priority": body.priority or 0, "cache_salt": body.cache_salt or "", "request_name": name}
    options["terms"] = checked.terms
    if body.use_beam_search and items:
        raise invalid("use_beam_search is not available for prompts with images", "use_beam_search")
    if body.use_beam_search:
        room = output_room(len(ids), client.welcome.limits.max_model_len)
        beams = beam_search_params(body, output_limit(params.max_tokens, room))
        search = BeamSearch(client, ids, beams, num_logprobs=params.logprobs, **options)
        return PromptRun(BeamStream(search, params, name), params, ids, first_choice)
    stream = client.submit(ids, params, marks=marks, items=items, **options)
    if params.n == checked.n:
        return PromptRun(stream, params, ids, first_choice)
    return PromptRun(stream, params, ids, first_choice, lambda deltas: _best(deltas, checked), checked)


def _best(deltas: list[Delta], checked: CheckedRequest) -> list[Delta]:
    """The n deltas with the highest mean log-probability of a token (OpenAI's best_of), best first."""
    best = sorted(deltas, key=_mean_logprob, reverse=True)[: checked.n]
    for index, delta in enumerate(best):
        delta.index = index
        if checked.num_logprobs is None:
            delta.logprobs = None
    return best


def _mean_logprob(delta: Delta) -> float:
    if isinstance(delta.logprobs, LogprobRows):
        return delta.logprobs.total() / max(1, len(delta.token_ids))
    rows = zip(delta.logprobs or [], delta.token_ids, strict=True)
    return sum(row[token].logprob for row, token in rows) / max(1, len(delta.token_ids))


def usage_of(runs: Sequence[PromptRun]) -> Usage:
    if len(runs) == 1 and runs[0].num_reasoning_tokens is None:  # most requests; takes a third of the time
        run = runs[0]
        prompt, completion = run.stream.num_prompt_tokens, sum(run.num_tokens) + run.num_tokens_left_out
        return Usage(prompt, completion, prompt + completion, _prompt_details(runs, run.stream.num_cached_tokens or 0))
    prompt = sum(run.stream.num_prompt_tokens for run in runs)
    completion = sum(sum(run.num_tokens) + run.num_tokens_left_out for run in runs)
    cached = sum(run.stream.num_cached_tokens or 0 for run in runs)
    reasoning = [run.num_reasoning_tokens for run in runs if run.num_reasoning_tokens is not None]
    details = CompletionTokensDetails(sum(map(sum, reasoning))) if reasoning else msgspec.UNSET
    return Usage(prompt, completion, prompt + completion, _prompt_details(runs, cached), details)


def _prompt_details(runs: Sequence[PromptRun], num_cached: int) -> PromptTokensDetails:
    if not any(run.stream.items for run in runs):
        return PromptTokensDetails(num_cached)
    return PromptTokensDetails(num_cached, num_tokens([item for run in runs for item in run.stream.items]))


class RunningUsage:
    """`usage_of` many prompts, kept up to date while they are streamed: a chunk must not look at thousands of sequences."""

    __slots__ = ("_num_cached", "_num_prompt", "_runs", "num_tokens")

    def __init__(self, runs: Sequence[PromptRun]) -> None:
        self._num_prompt = sum(run.stream.num_prompt_tokens for run in runs)
        self._num_cached = 0
        self._runs = [run for run in runs if run.stream.items]
        self.num_tokens = 0  # output tokens of all runs; the reader of the streams counts them

    def started(self, run: PromptRun) -> None:
        self._num_cached += run.stream.num_cached_tokens or 0

    def now(self) -> Usage:
        total = self._num_prompt + self.num_tokens
        return Usage(self._num_prompt, self.num_tokens, total, _prompt_details(self._runs, self._num_cached))
