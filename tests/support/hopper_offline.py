"""A simulated Hopper GPU for Triton: kernels are compiled for it, or only looked up; tensors have no memory.

Import it in a process of its own, before quire: it replaces Triton's driver and torch's properties of the GPU.
"""

import types

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

COMPILED: list = []  # kernels, in the order of their launches
KEYS: set = set()  # (function, specialisation) of each launch


class Hopper(DriverBase):
    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return "int"

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")

    def get_benchmarker(self):
        raise NotImplementedError

    def get_device_interface(self):
        return torch.cuda


driver.set_active(Hopper())
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)
_run = JITFunction.run


def compile_launches() -> None:
    def run(self, *args, warmup, **kwargs):
        COMPILED.append(_run(self, *args, warmup=True, **kwargs))

    JITFunction.run = run


def look_up_launches() -> None:
    """Note what each launch would have to be compiled for, and compile nothing."""

    def run(self, *args, grid, warmup, **kwargs):
        _kernels, kernel_key_cache, _target, _backend, binder = self.device_caches[0]
        _bound, specialization, options = binder(*args, debug=False, instrumentation_mode="", **kwargs)
        KEYS.add((self.fn.__name__, compute_cache_key(kernel_key_cache, specialization, options)))

    JITFunction.run = run


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return meta(*shape, dtype=torch.int32)
