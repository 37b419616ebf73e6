"""Run a batch of prompts through a client, for `LLM`: tokenized together, checked before any is sent, answered in order."""

import asyncio
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from quire.frontend.client.client import Client
from quire.frontend.client.lora_request import LoRARequest, terms_of
from quire.frontend.client.media_data import with_media, written
from quire.frontend.client.outputs import Delta, RequestOutput, add_delta, new_completions
from quire.frontend.client.progress_bar import ProgressBar
from quire.frontend.client.prompt import Prompt, PromptParts, split_prompt
from quire.frontend.client.stream import Overloaded, Stream
from quire.frontend.client.terms import Terms
from quire.ipc.sampling import RequestOutputKind, SamplingParams

_MEDIA_AT_ONCE = 64  # prompts that have their images read
_RETRY_S = 0.05  # when the engine's queue is full


async def run_batch(
    client: Client,
    prompts: list[Prompt],
    params: list[SamplingParams],
    priority: Sequence[int] | None,
    use_tqdm: bool,
    lora_requests: Sequence[LoRARequest | None] = (),
) -> list[RequestOutput]:
    """One output per prompt, in order. Raises ValueError and ClientErrors; then no request is left running."""
    resolved = await _resolve_all(client, prompts)
    checked = _check_batch(client, resolved, params)
    adapters = lora_requests or [None] * len(prompts)
    terms = {each: await terms_of(client, each) for each in dict.fromkeys(adapters)}
    priorities = priority or [0] * len(prompts)
    window = asyncio.Semaphore(max(64, 4 * client.welcome.limits.max_num_seqs))
    if len(prompts) > 1:
        client.hold()  # send the tasks' first requests together, so that the first step is full
    with ProgressBar(len(prompts), use_tqdm) as bar:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_run_one(client, given, *each, rank, window, bar, terms[lora]))
                    for given, each, rank, lora in zip(resolved, checked, priorities, adapters, strict=True)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    outputs = [task.result() for task in tasks]
    for i, (output, lora) in enumerate(zip(outputs, adapters, strict=True)):
        output.request_id, output.lora_request = str(i), lora
        for completion in output.outputs if lora is not None else ():
            completion.lora_request = lora
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
    texts = [written(client, parts) for parts in split if parts.text is not None and parts.ids is None]
    encoded = iter(await asyncio.to_thread(client.tokenizer.encode_batch, texts) if texts else ())
    found = [parts._replace(ids=next(encoded) if parts.ids is None else list(parts.ids)) for parts in split]
    window = asyncio.Semaphore(_MEDIA_AT_ONCE)

    async def with_its_media(i: int) -> PromptParts:
        async with window:
            try:
                return await with_media(client, found[i])
            except ValueError as error:
                raise type(error)(f"prompt {i}: {error}") from None

    if not any(parts.media for parts in found):
        return found
    return list(await asyncio.gather(*map(with_its_media, range(len(found)))))


async def _run_one(
    client: Client,
    given: PromptParts,
    ids: np.ndarray,
    params: SamplingParams,
    priority: int,
    window: asyncio.Semaphore,
    bar: ProgressBar,
    terms: Terms,
) -> RequestOutput:
    async with window:
        stream, deltas = await _collect(client, ids, params, priority, given, bar, terms)
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
    client: Client, ids: np.ndarray, params: SamplingParams, priority: int, given: PromptParts, bar: ProgressBar, terms: Terms
) -> tuple[Stream, list[Delta]]:
    while True:
        try:
            salt, items = given.cache_salt, given.media or ()
            stream = client.submit(ids, params, priority=priority, cache_salt=salt, marks=given.marks, items=items, terms=terms)
            bar.running.add(stream)
            try:
                return stream, await stream.collect()
            finally:
                bar.running.discard(stream)
                stream.cancel()
        except Overloaded:  # a low --max-num-waiting was set: a batch can wait
            await asyncio.sleep(_RETRY_S)
