"""Sizes of a layout that can be, and how layers are assigned to stages."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ipc.config import EngineConfig
from quire.ipc.layout import split_layers
from quire.ipc.worker_config import DAEMON_ONLY, ResolvedEngineConfig, WorkerConfig, resolved


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size must be between 1 and 64"),
        ({"pipeline_parallel_size": 65}, "--pipeline-parallel-size must be between 1 and 64"),
        (
            {"pipeline_parallel_size": 16, "tensor_parallel_size": 8},
            "--tensor-parallel-size 8 times --pipeline-parallel-size 16 must be at most 64",
        ),
        (
            {"pipeline_parallel_size": 2, "emulate_world_size": 2, "load_format": "dummy"},
            "--emulate-world-size runs one rank alone",
        ),
        (
            {"data_parallel_size": 8, "enable_expert_parallel": True},
            "not distributed .* all-to-all.*; use --tensor-parallel-size 8 --enable-expert-parallel instead",
        ),
    ],
)
def test_sizes_that_can_never_work_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)


def test_experts_are_distributed_over_ranks_of_each_engine():
    EngineConfig(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True)
    EngineConfig(enable_expert_parallel=True)


def test_workers_of_an_engine():
    assert EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3).world_size == 6
    assert EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3).output_rank == 4
    assert not {*WorkerConfig.__struct_fields__} & {*EngineConfig.__struct_fields__}  # a flag is said once


def test_workers_get_the_engines_flags_without_secrets():
    hidden = {name: f"private {name}" for name in ("hf_token", "listen", "curve_secret_key_file", "curve_allow_file")}
    config = EngineConfig(hosts="private hosts", hosts_key_file="private key", tensor_parallel_size=4, seed=3, **hidden)
    sizes = {"max_model_len": 100, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16}
    engine = resolved(config, device="cpu", **sizes)
    assert (engine.world_size, engine.seed, engine.device, engine.block_size) == (4, 3, "cpu", 16)
    encoded = msgspec.json.encode(engine)
    assert b"private" not in encoded
    assert msgspec.json.decode(encoded, type=ResolvedEngineConfig) == engine
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(EngineConfig()), type=ResolvedEngineConfig)


def test_stages_have_about_equal_bytes_with_embedding_and_head():
    assert split_layers(0, [1] * 6, 0, 3) == [range(2), range(2, 4), range(4, 6)]
    assert split_layers(10, [5] * 8, 10, 4) == [range(1), range(1, 4), range(4, 7), range(7, 8)]
    assert split_layers(0, [1, 1, 1, 9], 0, 2) == [range(3), range(3, 4)]
    assert split_layers(100, [1, 1, 1], 100, 3) == [range(1), range(1, 2), range(2, 3)]
    assert split_layers(5, [3, 3], 5, 1) == [range(2)]


@given(st.integers(0, 30), st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 30), st.integers(1, 7))
def test_no_other_way_is_more_equal(first, layers, last, count):
    count = min(count, len(layers))
    stages = split_layers(first, layers, last, count)
    assert [i for stage in stages for i in stage] == list(range(len(layers))) and all(len(stage) for stage in stages)

    def cost(cuts):
        held = [sum(layers[a:b]) for a, b in itertools.pairwise((0, *cuts, len(layers)))]
        held[0], held[-1] = held[0] + first, held[-1] + last
        return sum(n * n for n in held)

    found = cost([stage.stop for stage in stages[:-1]])
    assert found == min(cost(cuts) for cuts in itertools.combinations(range(1, len(layers)), count - 1))


def test_no_field_that_sounds_secret_reaches_a_worker():
    words = ("key", "token", "secret", "password", "curve_", "listen", "hosts")
    harmless = {
        "encoder_cache_tokens",
        "max_num_batched_tokens",
        "max_num_queued_tokens",
        "long_prefill_token_threshold",
        "tokenizer",
        "tokenizer_revision",
    }
    assert {n for n in EngineConfig.__struct_fields__ if any(w in n for w in words)} - harmless <= set(DAEMON_ONLY)
