"""Greedy tokens equal transformers' through HTTP, `LLM` and `AsyncClient` alike, cold and warm, in chunks, and preempted.

One model of each family, sixteen prompts at once. The engine by itself is held to more in test_greedy_equality.py.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from serving import Background, Served
from tiny_models import reference, tiny_model

from quire.frontend.client import AsyncClient
from quire.frontend.llm import LLM, SamplingParams

FAMILIES = ["llama", "mistral-sliding", "qwen2-mixed", "qwen3"]
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 64, 65, 80, 97]
IN_CHUNKS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 16, "block_size": 16}
TOO_SMALL = {**IN_CHUNKS, "num_gpu_blocks_override": 26, "admission": "optimistic"}

Tokens = list[list[int]]
Ask = Callable[[], Tokens]


@functools.cache
def prompts() -> Tokens:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def greedy(name: str) -> Tokens:
    """transformers' greedy tokens."""
    rows = []
    for prompt in prompts():
        with torch.inference_mode():
            out = reference(name).generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def over_http(served: Served, salt: str = "", stream: bool = False) -> Tokens:
    body = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True, "cache_salt": salt}
    rows: Tokens = [[] for _ in prompts()]
    if not stream:
        for choice in served.complete(prompts(), **body)["choices"]:
            rows[choice["index"]] = choice["token_ids"]
        return rows
    with served.stream(prompts(), **body) as events:
        for event in events:
            for choice in event["choices"]:
                rows[choice["index"]] += choice.get("token_ids") or []
        assert events.done
    return rows


def by_async_client(address: str, salt: str = "") -> Tokens:
    async def one(client: AsyncClient, prompt: list[int]) -> list[int]:
        async for output in client.generate(prompt, GREEDY, cache_salt=salt):
            last = output
        return last.outputs[0].token_ids

    async def all_of_them() -> Tokens:
        async with AsyncClient(address) as client:
            return list(await asyncio.gather(*(one(client, p) for p in prompts())))

    return asyncio.run(all_of_them())


def by_llm(llm: LLM) -> Tokens:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY, use_tqdm=False)]


def differing(name: str, rows: Tokens) -> list[int]:
    """Lengths of the prompts whose output is not transformers'."""
    return [len(p) for p, row, right in zip(prompts(), rows, greedy(name), strict=True) if row != right]


def flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_engine_cold_and_warm(name: str) -> None:
    """`LLM`'s engine, which also serves an AsyncClient and an HTTP frontend. A salt of one's own finds nothing cached."""
    reference(name)
    with (
        LLM(str(tiny_model(name)), **IN_CHUNKS, cpu_kv_cache_gib=0.05) as llm,
        Served("--engine", llm._background._core.address) as served,
    ):
        address = llm._background._core.address
        asks: dict[str, Ask] = {
            "LLM": lambda: by_llm(llm),
            "AsyncClient": lambda: by_async_client(address, "a"),
            "HTTP": lambda: over_http(served, "b"),
            "HTTP, streamed": lambda: over_http(served, "b", stream=True),
        }
        expected = Background(lambda: greedy(name))
        served.ready()
        hits = [cached_tokens(served)]
        for way, ask in asks.items():
            for temperature in ("cold", "warm"):
                assert differing(name, ask()) == [], f"{way}, {temperature}"
                expected.result()
                hits.append(cached_tokens(served))


@pytest.mark.parametrize("name", FAMILIES)
def test_in_a_kv_cache_so_small_that_requests_are_preempted(name: str) -> None:
    pass
