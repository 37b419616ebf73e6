"""Memory of recurrent states: each layer's part of it, and copies of whole states."""

import pytest
import tiny_hybrids
import torch
from tiny_models import tiny_model

from quire.ipc.memory_plan import STATE_ALIGNMENT, state_bytes
from quire.workers.memory import sizes_of
from quire.workers.models.config import StateTensor
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import StateCache, state_cache_of

TENSORS = {
    1: (StateTensor((2, 3, 5), is_recurrent=True), StateTensor((7, 3), is_recurrent=False)),
    4: (StateTensor((3,), is_recurrent=False),),
}


def cache_of(num_states):
    cache = StateCache(TENSORS, torch.float32, torch.bfloat16)
    cache.allocate(num_states, torch.device("cpu"))
    return cache


def test_a_state_has_every_layers_tensors_in_their_dtypes():
    cache = cache_of(3)
    (recurrent, inputs), (alone,) = cache.tensors(1), cache.tensors(4)
    assert (recurrent.shape, inputs.shape, alone.shape) == ((3, 2, 3, 5), (3, 7, 3), (3, 3))
    assert (recurrent.dtype, inputs.dtype, alone.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert cache.state_bytes == 3 * STATE_ALIGNMENT and recurrent.stride(0) * 4 == cache.state_bytes
    assert all(
        x[0].is_contiguous() and x.storage_offset() * x.itemsize % STATE_ALIGNMENT == 0 for x in (recurrent, inputs, alone)
    )
    assert all(not x[0].any() for x in (recurrent, inputs, alone)), "the dummy state is zero"


def test_no_tensor_lies_in_another_and_a_copy_is_of_all_of_one_state():
    cache = cache_of(4)
    views = [*cache.tensors(1), *cache.tensors(4)]
    for state in range(4):
        for i, x in enumerate(views):
            x[state] = 10 * state + i
    cache.copy(3, 1)
    found = [[int(value) for value in x[state].unique()] for state in range(4) for x in views]
    assert found == [[10 * state + i] for state in (0, 3, 2, 3) for i in range(3)]


def test_released_memory_is_gone_until_it_is_allocated_anew():
    cache = cache_of(4)
    cache.release()
    assert cache.num_states == 0
    cache.allocate(2, torch.device("cpu"))
    assert cache.tensors(4)[0].shape == (2, 3)


def test_a_model_without_states_takes_nothing():
    cache = StateCache({}, torch.float32, torch.float32)
    cache.allocate(1, torch.device("cpu"))
    assert cache.state_bytes == 0


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiny_hybrids.MODELS)
def test_an_estimate_counts_a_state_as_it_is_allocated(name, activations):
    """Their sizes are no multiples of the alignment."""
    config, ranks = read_model_config(tiny_model(name)), Parallel(0, 2)
    for parallel, dtype in ((Parallel(), "float32"), (Parallel(), "bfloat16"), (ranks, "float16")):
        cache = state_cache_of(config, parallel, activations, dtype)
        estimated = state_bytes(sizes_of(config, parallel), activations.itemsize, 4 if dtype == "float32" else 2)
        assert estimated == cache.state_bytes > 0
