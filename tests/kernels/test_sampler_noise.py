"""The sampler's noise: uniform, keyed by everything it should be, the same bits from numpy and from a kernel."""

import math

import numpy as np
import pytest
import torch

from quire.kernels.sampling import sampler_cpu

triton = pytest.importorskip("triton")
tl = triton.language

from quire.kernels.sampling.sampler_logits import log_exponential, noise_bits  # noqa: E402


def test_noise_is_uniform_and_differs_by_every_key():
    index = np.arange(200_000, dtype=np.uint32)
    keys = [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0), (2, 1, 3, 0), (3, 2, 1, 0)]
    streams = [sampler_cpu.noise_bits(*key, index) for key in keys]
    for bits in streams:
        counts = np.bincount(bits >> 24, minlength=256)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 255 + 5 * math.sqrt(510)
        low = np.bincount(bits & 255, minlength=256)
        assert ((low - low.mean()) ** 2 / low.mean()).sum() < 255 + 5 * math.sqrt(510)
    for i, first in enumerate(streams):
        for second in streams[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(len(index))
    along = [sampler_cpu.noise_bits(7, 8, at, 1, index[:4])[2] for at in range(4096)]  # one token, position by position
    counts = np.bincount(np.asarray(along) >> 27, minlength=32)
    assert ((counts - 128) ** 2 / 128).sum() < 31 + 5 * math.sqrt(62)


def test_the_exponential_keeps_its_resolution_at_the_winning_end():
    bits = np.array([0, 1, 2, 3, 2**24 + 1, 2**31, 2**32 - 1], np.uint32)
    exact = [math.log(-math.log1p(-(b + 0.5) / 2**32)) for b in bits.tolist()]
    np.testing.assert_allclose(sampler_cpu.log_exponential(bits)[:-1], exact[:-1], rtol=3e-6, atol=3e-7)
    assert np.isfinite(sampler_cpu.log_exponential(bits)).all()
    uniform = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    assert abs(np.exp(sampler_cpu.log_exponential(uniform)).mean() - 1) < 0.02


@triton.jit
def _noise_kernel(key, bits_ptr, log_ptr, PURPOSE: tl.constexpr):
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    bits = noise_bits(tl.load(key), tl.load(key + 1), tl.load(key + 2), PURPOSE, index)
    tl.store(bits_ptr + index, bits.to(tl.int32, bitcast=True))
    tl.store(log_ptr + index, log_exponential(bits))


def compare_noise(device):
    for key in ([1, 2, 3], [-5, 2**31 - 1, 100_000], [0, 0, 0], [-(2**31), -1, 7]):
        for purpose in (0, 1):
            bits = torch.zeros(8192, dtype=torch.int32, device=device)
            logs = torch.zeros(8192, device=device)
            _noise_kernel[(8,)](torch.tensor(key, dtype=torch.int32, device=device), bits, logs, purpose)
            want = sampler_cpu.noise_bits(*key, purpose, np.arange(8192, dtype=np.uint32))
            assert (bits.cpu().numpy().view(np.uint32) == want).all()
            np.testing.assert_allclose(logs.cpu().numpy(), sampler_cpu.log_exponential(want), rtol=1e-6, atol=1e-6)


@pytest.mark.interpret
def test_noise_is_the_same_to_the_bit_in_the_interpreter():
    compare_noise("cpu")


@pytest.mark.gpu
def test_noise_is_the_same_to_the_bit():
    compare_noise("cuda")
