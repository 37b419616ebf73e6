"""What is decided about memory: the largest step a worker measures, the KV blocks that fit, how many rows a step has.

And the one line that says so.
"""

import logging
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_models import tiny_model

from quire.enginecore import daemon
from quire.enginecore.device import Gpu
from quire.enginecore.loading.model_files import model_summary
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import GIB, GRAPHS_BYTES, PRIMITIVES_BYTES
from quire.ipc.messages.workers import FullAttention, KVGroup, SlidingWindow, WorkerProfile
from quire.workers.attention.kv_cache import KVCache
from quire.workers.devices.context import context_of
from quire.workers.memory import (
    OutOfMemory,
    cpu_budget,
    cpu_step_bytes,
    gpu_budget,
    graphs_bytes,
    largest_plan,
)
from quire.workers.models.config import NO_ATTENTION, PoolingSpec
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import StateCache

LLAMA_BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # keys and values, layers, heads, tokens, head size, float32


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "max_model_len", "lengths"),
    [
        (512, 16, 4096, [512]),
        (8192, 256, 4097, [4096, 4096]),
        (8192, 256, 3001, [3000, 3000, 2192]),
        (8192, 2, 3001, [3000, 3000]),
        (5, 16, 2, [1] * 5),
        (5, 4, 1, [1] * 4),
    ],
)
def test_the_largest_step_has_all_its_tokens_in_as_few_rows_as_can_be(max_tokens, max_rows, max_model_len, lengths):
    sizes = {"max_num_batched_tokens": max_tokens, "max_num_seqs": max_rows, "max_model_len": max_model_len}
    plan = largest_plan(SimpleNamespace(**sizes))
    assert plan.prefill_rows["length"].tolist() == lengths
    assert plan.num_tokens == len(plan.prefill_tokens) == sum(lengths)
    assert plan.max_seq_len == max(lengths) and len(set(plan.section("slot_updates")["slot"].tolist())) == len(lengths)


def resolved(monkeypatch, gpus=(), model="llama", **flags):
    """The workers' configuration on a machine with these GPUs."""
    monkeypatch.setattr(daemon, "find_gpus", lambda: list(gpus))
    folder = tiny_model(model)
    config = EngineConfig(model=str(folder), **flags)
    return daemon.worker_config(config, folder, model_summary(folder))


def resolved_engine(monkeypatch, gpus=(), **flags):
    return resolved(monkeypatch, gpus, **flags).engine


def cache_of(model):
    return KVCache(read_model_config(tiny_model(model)).attention_specs(Parallel()), 16, torch.float32)


# ------------------------------------------------------------------------------------------------------------ on a CPU
def test_a_cpu_has_the_blocks_that_its_gib_hold(monkeypatch):
    cache = cache_of("llama")
    assert cache.block_bytes == LLAMA_BLOCK_BYTES
    config = resolved_engine(monkeypatch, cpu_kv_cache_gib=1000.5 * LLAMA_BLOCK_BYTES / GIB)
    budget = cpu_budget(config, cache, 0, activation_bytes=7)
    assert (budget.num_blocks, budget.activation_bytes) == (1000, 7)


@pytest.mark.parametrize(("model", "num_groups"), [("llama", 1), ("qwen2-mixed", 2)])
def test_a_cpu_takes_no_more_than_a_full_house_of_longest_requests(monkeypatch, model, num_groups):
    config = resolved_engine(monkeypatch, model=model, cpu_kv_cache_gib=4.0, max_num_seqs=8, max_model_len=100)
    assert (
        cpu_budget(config, cache_of(model), 0, 0).num_blocks == num_groups * 8 * 7 + 1
    )  # 7 blocks of 16 hold 100; the null block


def test_a_cpu_cache_of_less_than_two_blocks_is_refused(monkeypatch):
    config = resolved_engine(monkeypatch, cpu_kv_cache_gib=1.9 * LLAMA_BLOCK_BYTES / GIB)
    with pytest.raises(OutOfMemory, match=f"^--cpu-kv-cache-gib .* no room for two blocks of {LLAMA_BLOCK_BYTES} bytes: raise"):
        cpu_budget(config, cache_of("llama"), 0, 0)


def test_a_model_without_attention_needs_the_null_block_alone(monkeypatch):
    config = resolved_engine(monkeypatch, cpu_kv_cache_gib=0.001)
    assert cpu_budget(config, KVCache([NO_ATTENTION] * 2, 16, torch.float32), 0, 0).num_blocks == 1


def test_what_a_step_takes_on_a_cpu_is_counted():
    config = read_model_config(tiny_model("llama"))
    taken = cpu_step_bytes(config, 512, 64, torch.float32) - PRIMITIVES_BYTES
    assert taken == 512 * (4 * 64 + 4 * 128) * 4 + 64 * 512 * 4 * 4
    assert cpu_step_bytes(config, 1024, 64, torch.float32) - PRIMITIVES_BYTES > 1.5 * taken / 2
    assert cpu_step_bytes(config, 512, 64, torch.bfloat16) - PRIMITIVES_BYTES < taken


def test_a_number_of_blocks_that_was_asked_for_is_taken(monkeypatch):
    config = resolved_engine(monkeypatch, cpu_kv_cache_gib=1e-9, num_gpu_blocks_override=26)
    assert cpu_budget(config, cache_of("llama"), 0, 0).num_blocks == 26


def test_the_memory_of_a_host_is_for_its_own_ranks_and_frontends(monkeypatch):
    def blocks(**flags):
        config = resolved_engine(monkeypatch, max_num_seqs=8000, tensor_parallel_size=4, host_memory_bytes=2 * GIB, **flags)
        return cpu_budget(config, cache_of("llama"), 0, 0).num_blocks

    of_all = blocks()
    assert blocks(host_ranks=1) > 3 * of_all and blocks(host_ranks=4) == of_all > blocks(frontends=2) > blocks(frontends=4)
    with pytest.raises(OutOfMemory, match=r"for 4 workers .* 2\.00 GiB are available"):
        blocks(kv_cache_memory_bytes=2 * GIB)


def test_every_sequence_that_runs_can_have_logits_processors(monkeypatch):
    """Of a model with a large vocabulary, whose generation_config may have a repetition penalty for all of them."""
    engine = resolved_engine(monkeypatch, max_num_seqs=300)
    model = msgspec.structs.replace(read_model_config(tiny_model("llama")), vocab_size=151_936)
    ctx = context_of(engine, model, cache_of("llama"), StateCache.of_nothing(), torch.float32, Parallel(), None)
    assert ctx.pool.num_rows == ctx.sampled_rows == 300


@pytest.mark.parametrize("generates", [False, True])
def test_a_model_that_only_pools_has_no_tables_for_sampling(monkeypatch, generates):
    engine = resolved_engine(monkeypatch, max_num_seqs=300)
    model = read_model_config(tiny_model("llama"))
    model = msgspec.structs.replace(model, pooling=PoolingSpec(generates=generates))
    ctx = context_of(engine, model, cache_of("llama"), StateCache.of_nothing(), torch.float32, Parallel(), None)
    assert (ctx.pool.num_rows, ctx.sampled_rows) == ((300, 300) if generates else (1, 0))


# ------------------------------------------------------------------------------------------------------------ on a GPU
@pytest.fixture
def gpu_memory(monkeypatch):
    """Say what a GPU would: (free, total) bytes."""

    def say(free, total):
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))

    return say


def test_a_gpu_has_what_its_share_leaves_after_all_in_use_a_step_and_graphs(monkeypatch, gpu_memory):
    gpu_memory(free=100 * GIB, total=140 * GIB)
    config = resolved_engine(monkeypatch, [Gpu("fake", 140 * GIB)], gpu_memory_utilization=0.75)
    budget = gpu_budget(config, cache_of("llama"), weights_bytes=30 * GIB, activation_bytes=2 * GIB, graphs_bytes=3 * GIB)
    room = 105 * GIB - 40 * GIB - 2 * GIB - 3 * GIB - GRAPHS_BYTES  # weights are among what is in use
    assert (budget.num_blocks, budget.activation_bytes) == (room // LLAMA_BLOCK_BYTES, 2 * GIB)


@pytest.mark.parametrize(
    ("weights", "eager", "expected"), [(GIB, False, 100 + 4000), (16 * 10**9, False, 100 + 1000), (GIB, True, 0)]
)
def test_graphs_take_their_logits_and_the_largest_captured_step(monkeypatch, weights, eager, expected):
    config = resolved_engine(monkeypatch, [Gpu("fake", 140 * GIB)], enforce_eager=eager, max_num_batched_tokens=8192)
    assert graphs_bytes(config, weights, activation_bytes=4000, logits_bytes=100) == expected


def test_a_gpu_without_room_is_refused_with_what_was_found(monkeypatch, gpu_memory):
    gpu_memory(free=9 * GIB, total=80 * GIB)
    config = resolved_engine(monkeypatch, [Gpu("fake", 80 * GIB)], gpu_memory_utilization=0.9)
    with pytest.raises(OutOfMemory) as error:
        gpu_budget(config, cache_of("llama"), weights_bytes=65 * GIB, activation_bytes=3 * GIB, graphs_bytes=GIB)
    assert str(error.value) == (
        "no memory is left for the KV cache: the GPU has 80.0 GiB, --gpu-memory-utilization 0.9 allows 72.0; "
        "weights take 65.0, a step 3.0, graphs 1.5, everything in use 71.0. "
        "Raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"
    )


@pytest.mark.parametrize(
    ("gpus", "flags", "max_num_seqs"),
    [
        ([Gpu("of 141 GB", 150_000_000_000)], {}, 1024),
        ([Gpu("of 80 GB", 79_100_000_000)], {}, 1024),
        ([Gpu("of 70 GB", 70_000_000_000)], {}, 1024),
        ([Gpu("just below", 69_999_999_999)], {}, 256),
        ([Gpu("of 24 GB", 24_000_000_000)], {}, 256),
        ([], {}, 64),
        ([Gpu("not used", 150_000_000_000)], {"device": "cpu"}, 64),
        ([Gpu("of 141 GB", 150_000_000_000)], {"max_num_seqs": 7}, 7),
    ],
)
def test_rows_of_a_step_by_default(monkeypatch, gpus, flags, max_num_seqs):
    assert resolved_engine(monkeypatch, gpus, **flags).max_num_seqs == max_num_seqs


# ------------------------------------------------------------------------------------------------------------ the line
def profile(**changes):
    made = WorkerProfile(
        rank=0,
        num_blocks=1001,
        block_size=16,
        kv_groups=[KVGroup(FullAttention(), [0, 1, 2])],
        vocab_size=512,
        device="CPU, float32",
        weights_bytes=3 * GIB // 2,
        activation_bytes=GIB // 4,
        block_bytes=GIB // 1000,
    )
    return msgspec.structs.replace(made, **changes)


def lines(monkeypatch, caplog, found, **flags):
    folder = tiny_model("llama")
    with caplog.at_level(logging.INFO, "quire.enginecore"):
        daemon.core_config_of(model_summary(folder), resolved(monkeypatch, **flags), found)
    return caplog.messages


@pytest.mark.parametrize(
    ("groups", "room"),
    [
        ([KVGroup(FullAttention(), [0, 1, 2])], "16000 tokens: 40.0 requests of 400 tokens"),
        (
            [KVGroup(FullAttention(), [0]), KVGroup(SlidingWindow(16), [1, 2])],
            "8000 tokens: 20.0 requests of 400 tokens",
        ),  # each token is in two blocks
    ],
)
def test_one_line_says_what_memory_is_for(monkeypatch, caplog, groups, room):
    assert lines(monkeypatch, caplog, profile(kv_groups=groups), max_model_len=400) == [
        f"CPU, float32: weights 1.50 GiB, activations 0.25 GiB, KV cache 1.00 GiB for {room}"
    ]


def test_a_cache_of_less_than_one_longest_request_is_warned_of(monkeypatch, caplog):
    line, warning = lines(monkeypatch, caplog, profile(num_blocks=11), max_model_len=400)
    assert line.endswith("for 160 tokens: 0.4 requests of 400 tokens")
    assert warning.startswith("the KV cache holds 160 tokens, less than the model's 400")
