"""Tensor parallelism without GPUs: ranks as threads, whose parts of a model, summed and joined, are the whole model."""

import pytest
import tiny_models
import torch
from step_contexts import context_of
from thread_ranks import on_every_rank
from workers.test_models import PROMPT, DenseAttention

from quire.workers.layers.adapter import Adapter
from quire.workers.layers.linear import Linear, Placement
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.shard import Shard, even_split, whole


def test_parts_of_a_dimension():
    assert [Parallel(rank, 3).split(12) for rank in range(3)] == [Shard(12, 0, 4), Shard(12, 4, 8), Shard(12, 8, 12)]
    assert Shard(4, 1, 3).times(16) == Shard(64, 16, 48) and not Shard(4, 1, 3).is_whole and whole(4).is_whole
    assert [Parallel(rank, 4).kv_heads(8).slice for rank in range(4)] == [slice(2 * r, 2 * r + 2) for r in range(4)]
    assert [Parallel(rank, 4).kv_heads(2).slice for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [even_split(11, rank, 4)[1:] for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [even_split(2, rank, 3).size for rank in range(3)] == [1, 1, 0]
    with pytest.raises(ValueError, match="a dimension of 10 cannot be split over 4 ranks"):
        Parallel(1, 4).split(10)
    with pytest.raises(ValueError, match="6 cannot be split over 4"):
        Parallel(1, 4).kv_heads(6)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        Parallel(2, 2)


def test_query_heads_are_never_held_twice():
    """Their products are summed over the ranks: neighbours with the same head would count it twice."""
    config = read_model_config(tiny_models.tiny_model("llama"))
    size = 2 * config.layers[0].attention.num_heads
    with pytest.raises(ValueError, match=f"cannot be split over {size} ranks"):
        build_model(config, torch.float32, Parallel(0, size))


def test_a_vocabulary_is_split_by_blocks_of_the_sampler():
    def parts(n, size):
        return [tuple(Parallel(rank, size).vocabulary(n)[1:]) for rank in range(size)]

    assert parts(1700, 4) == [(0, 512), (512, 1024), (1024, 1536), (1536, 1700)]
    assert parts(128256, 2) == [(0, 64512), (64512, 128256)]
    assert parts(513, 2) == [(0, 512), (512, 513)]
    assert parts(512, 2) == [(0, 512)] * 2  # too few blocks: each has the whole
    assert parts(1500, 4) == [(0, 1500)] * 4
    assert parts(700, 1) == [(0, 700)]


@pytest.mark.parametrize(
    ("changes", "size", "text"),
    [
        ({}, 3, "its 4 attention heads cannot be split over 3 ranks; 1, 2, 4 would do"),
        ({}, 8, "its 4 attention heads cannot be split over 8 ranks; 1, 2, 4 would do"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "its 4 KV heads cannot be split over 6 ranks; 1, 2, 4 would",
        ),
        ({"intermediate_size": 130}, 4, "its intermediate_size 130 cannot be split over 4 ranks; 1, 2 would do"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(changes, size, text):
    config = read_model_config(tiny_models.tiny_model("llama"), changes)
    with pytest.raises(ModelConfigError, match=f"--tensor-parallel-size {size} does not fit the model: {text}"):
        build_model(config, torch.float32, Parallel(0, size))


def test_one_rank_exchanges_nothing_and_its_layers_know_nothing_of_it():
    alone, x = Parallel(), torch.randn(2, 3)
    assert alone.all_reduce(x) is x and alone.all_logits(x, 3) is x
    place = Placement(torch.float32, alone)
    layer = Linear(alone.split(8), {"o_proj": whole(8)}, True, place)
    assert layer.outer is layer.format


def test_ranks_without_an_exchange_can_be_built_and_loaded_but_not_run():
    folder = tiny_models.tiny_model("split-llama")
    model = build_model(read_model_config(folder), torch.float32, Parallel(1, 2))
    load_weights(model, folder, "cpu")
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no exchange"):
        model.compute_all_logits(torch.zeros(1, 64))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["split-llama", "llama-tied", "split-qwen2", "split-qwen3"])
def test_the_ranks_together_are_the_whole_model(name, size):
    """Heads, where KV heads are fewer than ranks too, biases that must be added once, a head split over the vocabulary."""
    folder = tiny_models.tiny_model(name)
    config = read_model_config(folder)
    group_sizes = []

    def logits(parallel):
        model = build_model(config, torch.float32, parallel)
        load_weights(model, folder, "cpu")
        specs = config.attention_specs(parallel)
        group_sizes.append((specs[0].num_heads, specs[0].num_kv_heads))
        with torch.inference_mode():
            hidden = model(PROMPT, context_of(DenseAttention(specs), torch.arange(len(PROMPT))))
            return model.compute_all_logits(hidden)

    [alone], _ = on_every_rank(1, logits)
    parts, group = on_every_rank(size, logits)
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0], alone, atol=6e-5, rtol=1e-5)
    assert group.sums == 2 * len(config.layers) and group.gathers == (config.vocab_size > 512)
    first = config.layers[0].attention
    assert set(group_sizes[1:]) == {(first.num_heads // size, max(1, first.num_kv_heads // size))}


@pytest.mark.parametrize("name", ["split-llama", "split-qwen3"])
def test_dummy_weights_are_parts_of_the_whole_models(name):
    config = read_model_config(tiny_models.tiny_model(name))

    def logits(parallel):
        model = build_model(config, torch.float32, parallel)
        dummy_weights(model, 1)
        with torch.inference_mode():
            hidden = model(PROMPT, context_of(DenseAttention(config.attention_specs(parallel)), torch.arange(len(PROMPT))))
            return model.compute_all_logits(hidden)

    [alone], _ = on_every_rank(1, logits)
    for size in (2, 4):
        parts, _ = on_every_rank(size, logits)
        torch.testing.assert_close(parts[0], alone, atol=6e-5, rtol=1e-5)


def test_an_adapter_adds_before_the_ranks_sum():
    class Ones(Adapter):
        def expand(self, h, y):
            return y.add_(1)

    def result(parallel):
        layer = Linear(parallel.split(8), {"o_proj": whole(4)}, False, Placement(torch.float32, parallel))
        for parameter in layer.parameters():
            parameter.fill_(1.0)
        layer.format.finish()
        layer.set_adapter(Ones())
        return layer(torch.ones(3, 4))

    results, _ = on_every_rank(2, result)
    assert all(torch.equal(y, torch.full((3, 4), 10.0)) for y in results)
