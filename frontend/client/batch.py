"""Run a batch of prompts through a client, for `LLM`: tokenized together, checked before any is sent, answered in order."""

import asyncio
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from quire.frontend.client.client import Client
from quire.frontend.client.outputs import Delta, RequestOutput, add_delta, new_completions
from quire.frontend.client.progress_bar import ProgressBar
from quire.frontend.client.prompt import Prompt, PromptParts, split_prompt
from quire.frontend.client.stream import Overloaded, Stream
from quire.ipc.sampling import RequestOutputKind, SamplingParams

_RETRY_S = 0.05  # when the engine's queue is full


async def run_batch(
    client: Client, prompts: list[Prompt], params: list[SamplingParams], priority: Sequence[int] | None, use_tqdm: bool
) -> list[RequestOutput]:
    """One output per prompt, in order. Raises ValueError and ClientErrors; then no request is left running."""
    resolved = await _resolve_all(client, prompts)
    checked = _check_batch(client, resolved, params)
    priorities = priority or [0] * len(prompts)
    window = asyncio.Semaphore(max(64, 4 * client.welcome.limits.max_num_seqs))
    if len(prompts) > 1:
        client.hold()  # send the tasks' first requests together, so that the first step is full
    with ProgressBar(len(prompts), use_tqdm) as bar:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_run_one(client, given, *each, rank, window, bar))
                    for given, each, rank in zip(resolved, checked, priorities, strict=True)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    outputs = [task.result() for task in tasks]
    for i, output in enumerate(outputs):
        output.request_id = str(i)
    return outputs


def _check_batch(
    client: Client, resolved: list[PromptParts], params: list[SamplingParams]
) -> list[tuple[np.ndarray, SamplingParams]]:
    """Check all prompts before any runs. Returns ids (int32) and parameters as they are sent to the core."""
    found = []
    for_the_end: dict[int, tuple[SamplingParams, SamplingParams]] = {}  # by id(): usually one object for all
    for i, (given, p) in enumerate(zip(resolved, params, strict=True)):
        try:
            assert given.ids is not None
            ids, checked = client._check_prompt(given.ids), client._check_params(p, len(given.ids))
            if id(checked) not in for_the_end:
                for_the_end[id(checked)] = checked, replace(checked, output_kind=RequestOutputKind.FINAL_ONLY)
            found.append((ids, for_the_end[id(checked)][1]))
        except ValueError as error:
            raise type(error)(f"prompt {i}: {error}") from None
    return found


async def _resolve_all(client: Client, prompts: list[Prompt]) -> list[PromptParts]:
    """Each prompt with its ids; all texts are tokenized together, on all CPU cores."""
    split = [split_prompt(p) for p in prompts]
    texts = [parts.text for parts in split if parts.text is not None and parts.ids is None]
    encoded = iter(await asyncio.to_thread(client.tokenizer.encode_batch, texts) if texts else ())
    return [parts._replace(ids=next(encoded) if parts.ids is None else list(parts.ids)) for parts in split]


async def _run_one(
    client: Client,
    given: PromptParts,
    ids: np.ndarray,
    params: SamplingParams,
    priority: int,
    window: asyncio.Semaphore,
    bar: ProgressBar,
) -> RequestOutput:
    async with window:
        stream, deltas = await _collect(client, ids, params, priority, given, bar)
    outputs = new_completions(params.n, params.logprobs is not None)
    for delta in deltas:
        add_delta(outputs, delta)
    bar.add(len(ids), sum(len(o.token_ids) for o in outputs))
    return RequestOutput(
        request_id="",
        prompt=given.text,
        prompt_token_ids=ids.tolist(),
        prompt_logprobs=None if stream.prompt_logprobs is None else list(stream.prompt_logprobs),
        outputs=outputs,
        finished=True,
        num_cached_tokens=stream.num_cached_tokens,
        metrics=stream.metrics,
    )


async def _collect(
    client: Client, ids: np.ndarray, params: SamplingParams, priority: int, given: PromptParts, bar: ProgressBar
) -> tuple[Stream, list[Delta]]:
    while True:
        try:
            stream = client.submit(ids, params, priority=priority, cache_salt=given.cache_salt, marks=given.marks)
            bar.running.add(stream)
            try:
                return stream, await stream.collect()
            finally:
                bar.running.discard(stream)
                stream.cancel()
        except Overloaded:  # a low --max-num-waiting was set: a batch can wait
            await asyncio.sleep(_RETRY_S)
