"""Runs Gluon kernels by Python threads on the CPU: it tests a kernel's source, but not its compiled code.

A kernel's functions run unchanged, with `gl`, `tl`, barriers and copies replaced: partitions of a program are threads,
mbarriers count arrivals and bytes, TMA copies boxes at once and fills with zeros, asynchronous products are computed when they
begin. Shared memory is NaN at first. It does not show speed, races within a warpgroup, or effects of the hardware.
"""

import itertools
import math
import sys
import threading
import types

import torch
from torch._C import DisableTorchFunctionSubclass
from triton.runtime.jit import JITFunction

TIMEOUT_S = 100.0  # that a barrier is waited for: longer is a deadlock


class Tensor(torch.Tensor):
    """A tensor in registers, of no layout."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """The same as torch's own for a result that is one tensor or none; torch's took half of a kernel's time."""
        with DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is torch.Tensor else result

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(getattr(dtype, "torch", dtype))


def tensor(value):
    return torch.as_tensor(value).as_subclass(Tensor)


class DType:
    """Of a descriptor, and of pointers."""

    def __init__(self, dtype):
        self.torch = self.element_ty = dtype
        self.primitive_bitwidth = dtype.itemsize * 8

    def __eq__(self, other):
        return self.torch == getattr(other, "torch", other)


class Pointer:
    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset  # [n], everything from a tensor's first element on
        self.dtype = DType(memory.dtype)

    @classmethod
    def of(cls, x):
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((size,), (1,)))

    def to(self, dtype):
        return Pointer(self.memory.view(dtype), self.offset)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


class Program(int):
    """The number of a program."""

    def to(self, dtype):
        return tensor(int(self))


class Barrier:
    def __init__(self, count, condition):
        self.count, self.condition, self.left, self.bytes, self.phases = count, condition, count, 0, 0

    def change(self, arrivals=0, num_bytes=0):
        with self.condition:
            self.left -= arrivals
            self.bytes += num_bytes
            assert self.left >= 0
            if self.left == 0 and self.bytes == 0:
                self.left, self.phases = self.count, self.phases + 1
                self.condition.notify_all()

    def wait(self, parity):
        with self.condition:
            assert self.condition.wait_for(lambda: self.phases & 1 != parity, TIMEOUT_S), "deadlock"


class Buffer:
    """Shared memory, or a part of it."""

    def __init__(self, memory):
        self.memory, self.shape, self.dtype, self.layout = memory, tuple(memory.shape), memory.dtype, None

    def index(self, at):
        return Buffer(self.memory[int(at)])

    def slice(self, start, length, dim=0):
        assert start >= 0 and start + length <= self.shape[dim] and start % 8 == 0
        return Buffer(self.memory.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Buffer(self.memory.permute(order))

    def load(self, layout):
        return tensor(self.memory.clone())

    def store(self, value):
        self.memory.copy_(value)

    def _reinterpret(self, dtype, shape, layout):
        """Of as much memory as the shape takes, from here on."""
        memory = self.memory.view(getattr(dtype, "torch", dtype))
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return Buffer(memory.as_strided(shape, strides, memory.storage_offset()))


class Barriers:
    """An array of barriers."""

    def __init__(self, count):
        self.cells = [types.SimpleNamespace(barrier=None) for _ in range(count)]

    def index(self, at):
        return self.cells[int(at)]


class Descriptor:
    def __init__(self, given):
        self.lines = given.base.as_strided(given.shape, given.strides)
        self.dtype, self.layout = DType(given.base.dtype), given.layout
        self.block_type = types.SimpleNamespace(shape=tuple(given.block_shape))


def copy(desc, at, cell, buffer):
    at, box = list(map(int, at)), desc.block_type.shape
    assert buffer.shape == box and min(at) >= 0
    found = desc.lines[tuple(slice(first, first + size) for first, size in zip(at, box, strict=True))]
    buffer.memory.zero_()
    buffer.memory[tuple(map(slice, found.shape))] = found
    cell.barrier.change(num_bytes=-math.prod(box) * desc.dtype.torch.itemsize)


LAYOUTS = ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout", "SwizzledSharedLayout")
LAYOUTS += ("DistributedLinearLayout", "NVMMASharedLayout")


class Emulator:
    """Stands for a kernel: `emulator[grid](*args, **kwargs)` runs it, all programs at once."""

    def __init__(self, kernel: JITFunction, replaced: dict | None = None):
        """replaced: what takes the place of functions that are in assembly, by their names."""
        self._replaced = replaced or {}
        self._functions: dict[JITFunction, types.FunctionType] = {}
        self._atomics, self._condition, self._local = threading.Lock(), threading.Condition(), threading.local()
        self.gl, self.tl, self.mbarrier = self._language(), self._triton_language(), self._barriers()
        self._kernel = self._function(kernel)

    def __getitem__(self, grid):
        self._num_programs = grid[0]

        def launch(*args, num_warps, maxnreg=None, launch_pdl=False, **constants):
            programs = itertools.product(*map(range, grid))
            self._run([(self._kernel, tuple(map(argument, args)), constants, tuple(map(Program, i))) for i in programs])

        return launch

    def _run(self, calls):
        """In a thread each; raises the first error."""
        errors = []

        def run(function, args, constants, program):
            self._local.program = program
            try:
                function(*args, **constants)
            except Exception as error:  # raised below, by the thread that waits
                errors.append(error)

        threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _function(self, jitted):
        """A kernel's function for Python, whose names are those of its module, but for the language."""
        if jitted not in self._functions:
            names = dict(vars(sys.modules[jitted.__module__]))
            fn = jitted.fn
            self._functions[jitted] = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__)
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    names[name] = self._function(value)
                elif type(value).__name__ == "constexpr":
                    names[name] = value.value
            own = {"gl": self.gl, "tl": self.tl, "mbarrier": self.mbarrier, "_copy": copy, "fence_async_shared": lambda: None}
            names.update(own, warpgroup_mma=product, mma_v2=product, warpgroup_mma_wait=waited, **self._replaced)
        return self._functions[jitted]

    def _language(self):
        def atomic_add(pointer, value, sem, scope="gpu"):
            with self._atomics:
                before = pointer.memory[int(pointer.offset)].clone()
                pointer.memory[int(pointer.offset)] += value
            return tensor(before)

        def warp_specialize(calls, warps, registers):
            self._run([(function, args, {}, self._local.program) for function, args in calls])

        def allocate_shared_memory(dtype, shape, layout):
            if dtype == torch.int64:
                return Barriers(shape[0])
            memory = torch.zeros(shape, dtype=getattr(dtype, "torch", dtype))
            return Buffer(memory.fill_(float("nan")) if memory.is_floating_point() else memory)

        nothing = {name: lambda *args, **kwargs: None for name in LAYOUTS}
        return types.SimpleNamespace(
            **nothing, **vars(OPERATIONS), atomic_add=atomic_add, warp_specialize=warp_specialize,
            allocate_shared_memory=allocate_shared_memory,
            program_id=lambda axis: self._local.program[axis], num_programs=lambda axis: self._num_programs,
        )  # fmt: skip

    def _triton_language(self):
        return types.SimpleNamespace(
            exp=lambda x: torch.exp(tensor(x)), exp2=lambda x: torch.exp2(tensor(x)), debug_barrier=lambda: None,
            inline_asm_elementwise=assembly, int32=torch.int32, float32=torch.float32,
        )  # fmt: skip

    def _barriers(self):
        def init(cell, count):
            cell.barrier = Barrier(count, self._condition)

        return types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=init,
            expect=lambda cell, num_bytes: cell.barrier.change(1, num_bytes),
            arrive=lambda cell, count, pred=True: cell.barrier.change(count) if pred else None,
            wait=lambda cell, parity: cell.barrier.wait(int(parity)),
        )


def argument(given):
    if isinstance(given, torch.Tensor):
        return Pointer.of(given)
    return Descriptor(given) if hasattr(given, "block_shape") else given


def product(a, b, acc, use_acc=True, is_async=False):
    a, b = (x.memory if isinstance(x, Buffer) else x for x in (a, b))
    result = (torch.as_tensor(a).double() @ b.double()).float() if acc.is_floating_point() else a.int() @ b.int()
    return tensor(acc + result if use_acc else result)


def waited(pending, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def assembly(text, constraints, args, **options):
    """The instructions that kernels have."""
    if "bf16x2" not in text:
        return 1 / args[0]
    a, b = (x.contiguous().unsqueeze(-1).as_subclass(torch.Tensor).view(torch.bfloat16) for x in torch.broadcast_tensors(*args))
    found = a - b if text.startswith("sub") else a * b
    return tensor(found.view(torch.int32).squeeze(-1))


def load(pointer, mask=None, other=0, cache_modifier="", eviction_policy=""):
    offset = torch.as_tensor(pointer.offset).long()
    if pointer.memory.dtype == torch.float8_e4m3fn:  # torch knows few operations on these
        return load(pointer.to(torch.int8), mask).view(torch.float8_e4m3fn)
    if mask is None:
        return tensor(pointer.memory[offset])
    return tensor(torch.where(mask, pointer.memory[torch.where(mask, offset, 0)], other))


def store(pointer, value, mask=None):
    offset = torch.as_tensor(pointer.offset).long()
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).broadcast_to(offset.shape)
    mask = torch.as_tensor(True if mask is None else mask).broadcast_to(offset.shape)
    pointer.memory[offset[mask]] = value[mask]


OPERATIONS = types.SimpleNamespace(
    int8=torch.int8, int16=torch.int16, float16=torch.float16, int32=torch.int32, int64=torch.int64, float32=torch.float32,
    bfloat16=torch.bfloat16,
    pointer_type=lambda dtype: dtype, load=load, store=store,
    to_tensor=tensor,
    abs=torch.abs,
    zeros_like=torch.zeros_like,
    rsqrt=torch.rsqrt,
    div_rn=torch.div,
    fma=lambda a, b, c: (a.double() * b + c.double()).float(),
    join=lambda a, b: tensor(torch.stack((a, b), -1)),
    split=lambda x: (x[..., 0], x[..., 1]),
    exp=torch.exp,
    reduce=lambda x, axis, combine: x.sum(axis),
    arange=lambda start, end, layout=None: tensor(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout=None: tensor(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: tensor(torch.full(shape, value, dtype=dtype)),
    where=lambda condition, a, b: tensor(torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))),
    minimum=lambda a, b: tensor(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
    maximum=lambda a, b: tensor(torch.maximum(torch.as_tensor(a), torch.as_tensor(b))),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis),
    cdiv=lambda a, b: -(-a // b),
    static_range=range,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    inline_asm_elementwise=assembly,
)  # fmt: skip
