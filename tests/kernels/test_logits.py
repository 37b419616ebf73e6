"""Scaled and capped logits: the kernel against torch."""

import pytest
import torch

from quire.workers.layers import ops

CASES = [(0.25, 0.0), (1.0, 30.0), (0.0625, 2.0)]


def compare(shape, dtype, device, scale, softcap):
    from quire.kernels.elementwise.logits import shape_logits

    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape[0], shape[1] + 3, generator=g) * 20).to(device, dtype)[:, : shape[1]]
    want = ops.shape_logits(x.float().cpu(), scale, softcap)
    assert shape_logits(x, scale, softcap) is x
    torch.testing.assert_close(x.float().cpu(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_the_cpu_path_is_gemma_2s():
    x = torch.linspace(-90.0, 90.0, 50).view(2, 25)
    want = torch.tanh(x * 0.5 / 30.0) * 30.0
    torch.testing.assert_close(ops.shape_logits(x, 0.5, 30.0), want)


@pytest.mark.interpret
@pytest.mark.parametrize("scale,softcap", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5000)])
def test_kernel_in_the_interpreter(shape, scale, softcap):
    compare(shape, torch.float32, "cpu", scale, softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale,softcap", CASES)
def test_kernel(scale, softcap, dtype):
    compare((70, 256003), dtype, "cuda", scale, softcap)
