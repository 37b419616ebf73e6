"""Asks the CUDA driver for the GPUs: the core imports no torch, and must know them before it starts a worker."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple


class Gpu(NamedTuple):
    name: str
    memory_bytes: int


def find_gpus() -> list[Gpu]:
    """The CUDA devices this process may use (CUDA_VISIBLE_DEVICES counts); empty without a driver. Creates no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(cuda, i) for i in range(count.value)]


def unfit_for_ranks(gpus: Sequence[Gpu], tensor_parallel: int, pipeline_parallel: int = 1) -> str | None:
    """Why this many ranks cannot share a model on the first of these GPUs, as a text for the user; None if they can."""
    size, flags = tensor_parallel * pipeline_parallel, sizes_in_words(tensor_parallel, pipeline_parallel)
    if size > len(gpus):
        there = "1 is" if len(gpus) == 1 else f"{len(gpus)} are"
        needed = "so many GPUs are" if pipeline_parallel == 1 or tensor_parallel == 1 else f"{size} GPUs are"
        return f"{flags}: {needed} needed, and {there} there (CUDA_VISIBLE_DEVICES counts)"
    if len({gpu.name for gpu in gpus[:size]}) > 1:
        names = ", ".join(gpu.name for gpu in gpus[:size])
        return f"{flags}: these GPUs differ ({names}); choose equal ones by CUDA_VISIBLE_DEVICES"
    return None


def sizes_in_words(tensor_parallel: int, pipeline_parallel: int) -> str:
    """The flags that divide a model among GPUs, with their values."""
    flags = {"--tensor-parallel-size": tensor_parallel, "--pipeline-parallel-size": pipeline_parallel}
    return " and ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1 or max(flags.values()) == 1)


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetName(name, 256, device)
    return Gpu(name.value.decode(), memory.value)
