"""A model on two and four GPUs: fp32 tokens equal transformers', in graphs and eagerly; ranks killed and stopped mid-stream."""

import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from gpu.test_gpu_engine import GREEDY, prompts, wrong_rows
from served_ranks import WORKER, restarts_of
from serving import EventStream, Served, ends_well, until
from tiny_models import tiny_model

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}


def on(size: int, *more: Any) -> Any:
    """A case of a test that needs so many GPUs."""
    return pytest.param(size, *more, marks=pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs"))


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return [list(child.token_ids) for output in outputs for child in output.outputs]


def assert_equals_transformers(name: str, **layout: Any) -> None:
    """Greedy tokens, cached ones too; and a seed gives the same again."""
    llm = LLM(str(tiny_model(name)), **layout, **OPTIONS)
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
        assert wrong_rows(name, tokens(llm, greedy)) == []
        assert wrong_rows(name, tokens(llm, greedy)) == []  # from the prefix cache
        seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, n=2, max_tokens=20, ignore_eos=True, presence_penalty=0.3)
        assert tokens(llm, seeded) == tokens(llm, seeded)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("size", [on(2), on(4)])
@pytest.mark.parametrize(("name", "eager"), [("gpu-llama", False), ("gpu-qwen3", True), ("split-gpu-llama", False)])
def test_fp32_on_several_equals_transformers(name, eager, size):
    assert_equals_transformers(name, tensor_parallel_size=size, enforce_eager=eager)


@pytest.mark.parametrize("size", [on(2), on(4)])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "eager"), [("gpu-qwen2-moe", False), ("gpu-mixtral-sliding-tied", False), ("gpu-gpt-oss", True)]
)
def test_parts_of_experts_and_whole_ones_give_the_tokens_of_one(name, eager, expert_parallel, size):
    llm = LLM(
        str(tiny_model(name)),
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
        enforce_eager=eager,
        **OPTIONS,
    )
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
        assert wrong_rows(name, tokens(llm, greedy)) == []
        assert wrong_rows(name, tokens(llm, greedy)) == []  # from the prefix cache
    finally:
        llm.shutdown()


def served_on(*layout: str) -> Iterator[Served]:
    arguments = ("--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M", *layout)
    with Served(str(tiny_model("gpu-llama")), *arguments, "--collective-timeout-s", "3", "--max-model-len", "512") as served:
        yield served.ready()


@pytest.fixture(scope="module", params=[on(2), on(4)])
def served(request):
    yield from served_on("-tp", str(request.param))


def running(served: Served) -> EventStream:
    stream = served.stream([5, 6, 7, 8], max_tokens=500, ignore_eos=True)
    next(iter(stream))
    return stream


def num_ranks(served: Served) -> int:
    text = served.ask("GET", "/metrics").body.decode()
    return len(set(re.findall(r'process="(worker-\d+)"', text)))


def assert_lost_and_replaced(served: Served, signal: str, rank: int) -> None:
    """A rank that is killed or stopped amid a stream is named, and what replaces all says what they said."""
    body = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    want = served.complete([5, 6, 7], **body)["choices"][0]["token_ids"]
    restarts = restarts_of(served)
    processes = sorted(map(psutil.Process, served.pids(WORKER)), key=lambda p: (p.create_time(), p.pid))
    del processes[num_ranks(served) :]  # processes that are kept ready
    before = [process.pid for process in processes]
    stream = running(served)
    getattr(processes[rank], signal)()
    assert ends_well(stream)
    served.line(f"worker {rank % len(before)} (ended unexpectedly|was stopped by a signal)", 1)
    until(lambda: served.metric("worker_restarts_total") == restarts + 1 and served.health() == 200)
    assert not set(served.pids(WORKER)) & set(before)
    assert served.complete([5, 6, 7], **body)["choices"][0]["token_ids"] == want


@pytest.mark.parametrize("signal", ["kill", "suspend"])
@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_lost_is_named_and_all_are_replaced(served, signal, rank):
    assert_lost_and_replaced(served, signal, rank)
