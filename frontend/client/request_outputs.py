"""RequestOutputs of a running request for Python callers: cumulative, incremental, or only the final one.

`SamplingParams.output_kind` chooses. Called by Client.generate (client.py), which owns the stream; `merged` is for callers that
read less often than outputs arrive (llm_engine.py).
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from quire.frontend.client.outputs import (
    CompletionOutput,
    Delta,
    RequestOutput,
    TokenLogprobDict,
    add_delta,
    new_completions,
    snapshot,
)
from quire.frontend.client.stream import Stream
from quire.ipc.sampling import RequestOutputKind, SamplingParams


async def request_outputs(
    stream: Stream, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
) -> AsyncIterator[RequestOutput]:
    """Yield an output for each turn of the stream that has news; the last one is `finished`. Raises the stream's errors."""
    kind = params.output_kind
    outputs = _Changes(params) if kind is RequestOutputKind.DELTA else _Whole(params)
    prompt_logprobs = None
    async for deltas in stream:
        for delta in deltas:
            outputs.add(delta)
        if prompt_logprobs is None and stream.prompt_logprobs is not None:
            prompt_logprobs = list(stream.prompt_logprobs)
        if kind is RequestOutputKind.FINAL_ONLY and not outputs.finished:
            continue
        yield RequestOutput(
            request_id=stream.request_name,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs.taken(),
            finished=outputs.finished,
            num_cached_tokens=stream.num_cached_tokens,
            metrics=stream.metrics,
        )


class _Whole:
    """Every completion, with all its output so far."""

    def __init__(self, params: SamplingParams) -> None:
        self._outputs = new_completions(params.n, params.logprobs is not None)

    def add(self, delta: Delta) -> None:
        add_delta(self._outputs, delta)

    @property
    def finished(self) -> bool:
        return all(map(CompletionOutput.finished, self._outputs))

    def taken(self) -> list[CompletionOutput]:
        return snapshot(self._outputs)


class _Changes:
    """Completions with new output since they were last taken, and only that; cumulative_logprob stays cumulative."""

    def __init__(self, params: SamplingParams) -> None:
        self._fresh = new_completions(params.n, params.logprobs is not None)
        self._changed = set[int]()
        self._left = params.n

    def add(self, delta: Delta) -> None:
        add_delta(self._fresh, delta)
        self._changed.add(delta.index)
        self._left -= delta.finish_reason is not None

    @property
    def finished(self) -> bool:
        return not self._left

    def taken(self) -> list[CompletionOutput]:
        taken = [self._fresh[index] for index in sorted(self._changed)]
        for output in taken:
            rows = None if output.logprobs is None else list[TokenLogprobDict]()
            self._fresh[output.index] = replace(output, text="", token_ids=[], logprobs=rows)
        self._changed.clear()
        return taken


def merged(first: RequestOutput | None, second: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Merge two outputs of a request: the second if they are cumulative, both if they are incremental."""
    if first is None or params.output_kind is not RequestOutputKind.DELTA:
        return second
    outputs = {output.index: output for output in first.outputs}
    for new in second.outputs:
        old = outputs.get(new.index)
        if old is None:
            outputs[new.index] = new
            continue
        rows = None if old.logprobs is None or new.logprobs is None else old.logprobs + new.logprobs
        outputs[new.index] = replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=rows)
    return replace(second, outputs=[outputs[index] for index in sorted(outputs)])
