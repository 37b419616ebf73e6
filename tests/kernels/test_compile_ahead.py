"""Kernels compiled ahead, side by side: compiled they are, run they are not."""

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


@pytest.mark.gpu
def test_gpu_kernels_are_compiled_and_not_run(monkeypatch):
    from quire.kernels.compile_ahead import compile_only

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
    from quire.kernels.compile_ahead import compile_only

    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    with compile_only():
        _wrong_kernel[(1,)](x)
        _wrong_kernel[(1,)](x)
    with pytest.raises(Exception, match="power of 2"):
        _wrong_kernel[(1,)](x)
    _add_kernel[(1,)](x, 5)
    assert x.item() == 5
