"""Greedy tokens equal transformers' through HTTP, `LLM` and `AsyncClient` alike: alone, cold, warm, in chunks, preempted.

One model of each family; sixteen prompts at once, or a few one after the other. The engine by itself is held to more in
test_greedy_equality.py.
"""

import asyncio
import functools
import math
from collections.abc import Callable

import pytest
import torch
from serving import Served, until
from tiny_models import reference, tiny_model

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.llm import LLM
from quire.frontend.client.outputs import RequestOutput
from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "mistral-sliding", "qwen2-mixed", "qwen3"]
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 64, 65, 80, 97]
IN_CHUNKS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 16, "block_size": 16}
ALONE = {**IN_CHUNKS, "max_num_batched_tokens": 512, "enable_prefix_caching": False, "cpu_kv_cache_gib": 0.05}
TOO_SMALL = {**IN_CHUNKS, "num_gpu_blocks_override": 26, "admission": "optimistic"}

Tokens = list[list[int]]
Answers = tuple[Tokens, int]  # of all prompts, and how many prompt tokens were found in the prefix cache


@functools.cache
def prompts() -> Tokens:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def not_greedy(name: str, asked: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]) -> list[int]:
    """Lengths of the prompts whose outputs are not transformers' greedy tokens.

    They are if each token is the argmax after those before it: one pass over all sequences, padded behind their ends, will do.
    """
    ids = torch.zeros((len(asked), max(map(len, asked)) + NEW_TOKENS), dtype=torch.long)
    for row, prompt, output in zip(ids, asked, outputs, strict=True):
        row[: len(prompt) + NEW_TOKENS] = torch.tensor([*prompt, *output])
    with torch.inference_mode():
        best = reference(name)(ids).logits.argmax(-1)
    lengths = map(len, asked)
    return [n for n, row, output in zip(lengths, best, outputs, strict=True) if row[n - 1 :][:NEW_TOKENS].tolist() != [*output]]


def over_http(served: Served, asked: Tokens, salt: str = "", stream: bool = False) -> Answers:
    body = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True, "cache_salt": salt or None}
    rows: Tokens = [[] for _ in asked]
    if not stream:
        answer = served.complete(asked, **body)
        for choice in answer["choices"]:
            rows[choice["index"]] = choice["token_ids"]
        return rows, answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    with served.stream(asked, **body, stream_options={"include_usage": True}) as events:
        for event in events:
            usage = event["usage"]
            for choice in event["choices"]:
                rows[choice["index"]] += choice.get("token_ids") or []
        assert events.done
    return rows, usage["prompt_tokens_details"]["cached_tokens"]


def by_async_client(address: str, asked: Tokens, salt: str = "") -> Answers:
    async def one(client: AsyncClient, prompt: list[int]) -> RequestOutput:
        async for output in client.generate(prompt, GREEDY, cache_salt=salt):
            last = output
        return last

    async def all_of_them() -> list[RequestOutput]:
        async with AsyncClient(address) as client:
            return list(await asyncio.gather(*(one(client, p) for p in asked)))

    return answers(asyncio.run(all_of_them()))


def by_llm(llm: LLM, asked: Tokens) -> Answers:
    return answers(llm.generate(asked, GREEDY, use_tqdm=False))


def answers(outputs: list[RequestOutput]) -> Answers:
    return [output.outputs[0].token_ids for output in outputs], sum(output.num_cached_tokens or 0 for output in outputs)


def one_by_one(ask: Callable[[Tokens], Answers], asked: Tokens) -> Answers:
    """Each prompt is sent once the one before it was answered: it runs alone."""
    each = [ask([prompt]) for prompt in asked]
    return [row for rows, _ in each for row in rows], sum(num_cached for _, num_cached in each)


def differing(name: str, rows: Tokens, asked: Tokens | None = None) -> list[int]:
    """Lengths of the prompts (all, or those asked) whose outputs are not what transformers would say."""
    asked = prompts() if asked is None else asked
    wrong = [len(prompt) for prompt, row in zip(asked, rows, strict=True) if len(row) != NEW_TOKENS]
    return wrong or not_greedy(name, tuple(map(tuple, asked)), tuple(map(tuple, rows)))


def num_preemptions(served: Served) -> float:
    value = served.metric("num_preemptions_total")
    return 0.0 if math.isnan(value) else value


@pytest.mark.parametrize("name", FAMILIES)
def test_alone_one_after_the_other(name: str) -> None:
    few = prompts()[::5]
    with LLM(str(tiny_model(name)), **ALONE) as llm:
        address = llm._own.background._cores[0].address
        with Served("--engine", address) as served:
            for ask in (
                lambda asked: by_llm(llm, asked),
                lambda asked: by_async_client(address, asked),
                lambda asked: over_http(served, asked),
                lambda asked: over_http(served, asked, stream=True),
            ):
                rows, num_cached = one_by_one(ask, few)
                assert (differing(name, rows, few), num_cached) == ([], 0)
            assert served.end() == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_cold_and_warm_in_chunks_of_32_tokens(name: str) -> None:
    """`LLM`'s engine, which an AsyncClient and an HTTP frontend share; with a salt of its own each finds the cache cold."""
    with LLM(str(tiny_model(name)), **IN_CHUNKS, cpu_kv_cache_gib=0.05) as llm:
        address = llm._own.background._cores[0].address
        with Served("--engine", address) as served:
            for ask_cold, ask_warm in (
                (lambda: by_llm(llm, prompts()), lambda: by_llm(llm, prompts())),
                (lambda: by_async_client(address, prompts(), "a"), lambda: by_async_client(address, prompts(), "a")),
                (lambda: over_http(served, prompts(), "b"), lambda: over_http(served, prompts(), "b", stream=True)),
            ):
                cold, num_cached = ask_cold()
                assert (differing(name, cold), num_cached) == ([], 0)
                assert min(len(set(row)) for row in cold) >= 16  # so varied that a fault would be seen
                warm, num_cached = ask_warm()
                assert differing(name, warm) == [] and num_cached > 400
            assert served.end() == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_in_a_kv_cache_so_small_that_requests_are_preempted(name: str) -> None:
    with LLM(str(tiny_model(name)), **TOO_SMALL) as llm:
        address = llm._own.background._cores[0].address
        with Served("--engine", address) as served:
            for ask in (
                lambda: by_llm(llm, prompts()),
                lambda: by_async_client(address, prompts()),
                lambda: over_http(served, prompts()),
            ):
                before = num_preemptions(served)
                assert differing(name, ask()[0]) == []
                until(lambda before=before: num_preemptions(served) > before)
            assert served.end() == 0
