"""Outputs of running and finished requests: vLLM's classes for Python callers, and the small incremental `Delta`.

`LLM.generate` and `AsyncClient.generate` return `RequestOutput`s: cumulative, one per request. A `Stream` yields `Delta`s,
which the HTTP routes turn into SSE chunks: the new output of one child of a request since the consumer's last turn. Nothing
here talks to the core or knows a tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quire.frontend.client.not_here import METRICS_FIELDS, OUTPUT_FIELDS, missing, without
from quire.ipc.messages.frontend import FinishReason


class Logprob(msgspec.Struct, gc=False):
    """Log-probability of one token at one position; `rank` counts from 1, the most likely token of the vocabulary."""

    logprob: float
    rank: int = 0
    decoded_token: str = ""


# For one position: first its token, then the most likely tokens (a token that is both appears once).
TokenLogprobDict = dict[int, Logprob]
SampleLogprobs = list[TokenLogprobDict]
PromptLogprobs = list[TokenLogprobDict | None]  # the first token has none


class Delta(msgspec.Struct):
    """The new output of a request's child since its consumer last took it; several steps are merged into one Delta.

    text: new text, possibly "" (half a character, or a possible beginning of a stop string, is held back).
    token_ids: the new tokens, including those with text held back, and the stop token. logprobs: one dict for each of them;
    None if not asked for. finish_reason: set in the child's last Delta. stop_reason: the stop string or the stop token id that
    ended it; None for an end-of-sequence token. num_tokens: output tokens of this child so far, these included.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobDict] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request: seconds since the Unix epoch, queue_s in seconds; None while not known."""

    arrival_time: float
    queue_s: float | None = None  # from arrival at the core to the first step
    first_token_time: float | None = None
    last_token_time: float | None = None  # as the consumer saw it
    finished_time: float | None = None
    drafts: list[tuple[int, int]] | None = None  # by step with drafts: verified, accepted; None unless the engine tells them
    scheduler_time = model_forward_time = model_execute_time = None  # vLLM's: always None

    @property
    def time_in_queue(self) -> float | None:
        return self.queue_s

    @property
    def first_scheduled_time(self) -> float | None:
        return None if self.queue_s is None else self.arrival_time + self.queue_s

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    # vLLM's newer names
    queued_ts = property(lambda self: self.arrival_time)
    scheduled_ts = first_scheduled_time
    first_token_ts = property(lambda self: self.first_token_time)
    last_token_ts = property(lambda self: self.last_token_time)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return without(self, name, METRICS_FIELDS)


@dataclass
class CompletionOutput:
    """One completion, cumulative. cumulative_logprob: sum over the sampled tokens; None unless logprobs were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobDict] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None  # the LoRARequest that its request brought
    routed_experts = None  # a field of vLLM's that scripts read; always None here

    def finished(self) -> bool:
        return self.finish_reason is not None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return missing(self, name, OUTPUT_FIELDS)


@dataclass
class RequestOutput:
    """A request's prompt and its completions, in order of index. prompt is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    lora_request: Any = None  # the LoRARequest that the request brought
    encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = None  # vLLM's: always None
    multi_modal_placeholders = prompt_routed_experts = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return missing(self, name, OUTPUT_FIELDS)


def new_completions(n: int, with_logprobs: bool) -> list[CompletionOutput]:
    """n empty completions, for `add_delta` to fill."""
    return [
        CompletionOutput(i, cumulative_logprob=0.0 if with_logprobs else None, logprobs=[] if with_logprobs else None)
        for i in range(n)
    ]


def add_delta(outputs: list[CompletionOutput], delta: Delta) -> None:
    """Add a Delta to the completion it belongs to."""
    out = outputs[delta.index]
    out.text += delta.text
    out.token_ids += delta.token_ids
    if delta.logprobs is not None and out.logprobs is not None and out.cumulative_logprob is not None:
        rows = list(delta.logprobs)
        out.logprobs += rows
        out.cumulative_logprob += sum(row[t].logprob for row, t in zip(rows, delta.token_ids, strict=True))
    if delta.finish_reason is not None:
        out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason


def snapshot(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """Copies that later deltas do not change."""
    return [replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs)) for o in outputs]
