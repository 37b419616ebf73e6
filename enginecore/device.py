"""What GPUs there are, asked of the driver itself: the core imports no torch, and must know before it starts a worker."""

import ctypes
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


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetName(name, 256, device)
    return Gpu(name.value.decode(), memory.value)
