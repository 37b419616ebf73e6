"""What is an engine's own among several: GPUs from its first on, if there are enough for all, and the seed of its requests."""

import pytest

from quire.enginecore.daemon import StartupError, _own_gpus, _requests_seed
from quire.enginecore.device import Gpu
from quire.frontend.launcher import engine_configs
from quire.ipc.config import EngineConfig

GPUS = [Gpu(f"GPU {i}", 1 << 30) for i in range(4)]


@pytest.mark.parametrize(("size", "index"), [(1, 0), (1, 3), (4, 0), (4, 3), (2, 2)])
def test_an_engine_takes_gpus_from_its_first_on(size: int, index: int) -> None:
    assert _own_gpus(EngineConfig(data_parallel_size=size, device_index=index), GPUS) == GPUS[index:]


@pytest.mark.parametrize("index", range(5))
def test_too_few_gpus_are_said_by_both_numbers(index: int) -> None:
    with pytest.raises(StartupError, match=r"^--data-parallel-size 5 needs 5 GPUs, and there are 4 \(CUDA_VISIBLE"):
        _own_gpus(EngineConfig(data_parallel_size=5, device_index=index), GPUS)
    with pytest.raises(StartupError, match="and there is 1 "):
        _own_gpus(EngineConfig(data_parallel_size=2), GPUS[:1])


def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(StartupError, match="device_index 4: GPUs are numbered 0 to 3 here"):
        _own_gpus(EngineConfig(device_index=4), GPUS)


def test_on_a_cpu_there_is_nothing_to_share() -> None:
    assert _own_gpus(EngineConfig(data_parallel_size=8, device_index=7), []) == []


def test_engines_of_one_model_draw_different_noise() -> None:
    configs = engine_configs(EngineConfig(data_parallel_size=3, tensor_parallel_size=2, seed=7))
    assert len({_requests_seed(config) for config in configs}) == 3
    assert {config.seed for config in configs} == {7}  # their dummy weights are the same
    assert _requests_seed(EngineConfig(seed=7, device_index=3)) == 7
