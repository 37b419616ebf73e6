"""Kernels compiled ahead, side by side: compiled they are, run they are not."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def _add_kernel(x_ptr, AMOUNT: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + AMOUNT)


@triton.jit
def _wrong_kernel(x_ptr):
    tl.store(x_ptr, tl.arange(0, 3))


def test_threads_that_load_launchers_of_one_name_get_their_own(monkeypatch):
    """Python gives the newest module of a name, with the functions of the file asked for put in."""
    from triton.runtime import build

    from quire.kernels.triton_support.compile_ahead import own_modules

    newest, loading, overlaps = SimpleNamespace(), [], []

    def load(name, path):
        loading.append(path)
        newest.launch = path
        overlaps.append(len(loading) > 1)
        loading.remove(path)
        return newest

    monkeypatch.setattr(build, "_load_module_from_path", load)
    first, second = (build._load_module_from_path("launcher", path) for path in "ab")
    assert first.launch == second.launch == "b"  # the trouble
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with own_modules() as may_load, ThreadPoolExecutor(8) as pool:
            modules = list(pool.map(lambda n: build._load_module_from_path("launcher", str(n)), range(2000)))
    finally:
        sys.setswitchinterval(interval)
    assert may_load and [module.launch for module in modules] == [str(n) for n in range(2000)] and not any(overlaps)
    assert build._load_module_from_path is load


def test_a_triton_without_the_loader_makes_launchers_one_after_the_other(monkeypatch):
    from triton.runtime import build

    from quire.kernels.triton_support.compile_ahead import own_modules

    monkeypatch.delattr(build, "_load_module_from_path")
    with own_modules() as may_load:
        assert not may_load and not hasattr(build, "_load_module_from_path")


class _Broken:
    """A kernel that this GPU cannot hold."""

    @property
    def run(self):
        raise RuntimeError("out of resource: shared memory")


class _Finished:
    """A future of Triton's whose compilation has ended."""

    def __init__(self, error=None):
        self.error = error

    def done(self):
        return True

    def exception(self):
        return self.error


def test_what_cannot_be_loaded_is_left_for_its_launch():
    from quire.kernels.triton_support import compile_ahead

    compile_ahead._make_launcher(_Broken())
    taken = []
    for future in (None, _Finished(ValueError("wrong")), _Finished()):
        compile_ahead._take_result(SimpleNamespace(future=future, result=lambda f=future: taken.append(f)))
    assert len(taken) == 1 and taken[0].error is None


@pytest.mark.gpu
def test_gpu_kernels_are_compiled_and_not_run(monkeypatch):
    from quire.kernels.triton_support.compile_ahead import compile_only

    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found["key"]))
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    with compile_only():
        for amount in (1, 2, 3, 1):
            _add_kernel[(1,)](x, amount)
    assert x.item() == 0 and len(compiled) == 3
    for amount in (1, 2, 3):
        _add_kernel[(1,)](x, amount)
    assert x.item() == 6 and len(compiled) == 3


@pytest.mark.gpu
def test_gpu_what_cannot_be_compiled_is_said_when_it_is_called():
    from quire.kernels.triton_support.compile_ahead import compile_only

    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    with compile_only():
        _wrong_kernel[(1,)](x)
        _wrong_kernel[(1,)](x)
    with pytest.raises(Exception, match="power of 2"):
        _wrong_kernel[(1,)](x)
    _add_kernel[(1,)](x, 5)
    assert x.item() == 5
