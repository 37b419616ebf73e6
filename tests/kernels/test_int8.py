"""int8 weights with int8 activations against exact sums."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import norm  # noqa: E402
from quire.kernels.linear import fp8, int8  # noqa: E402
from quire.kernels.linear.scaled import Scaled  # noqa: E402
from quire.kernels.triton_support import hopper  # noqa: E402
from quire.kernels.tuning.current import current  # noqa: E402


def drawn(n, k, device):
    g = torch.Generator().manual_seed(n + k)
    data = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    return Scaled(data.to(device), ((torch.rand(n, 1, generator=g) + 0.5) / 74 / k**0.5).to(device))


def check_scaling(device, dtype):
    g = torch.Generator().manual_seed(0)
    sums = torch.randint(-(2**24), 2**24, (3, 2600), generator=g, dtype=torch.int32).to(device)
    xs, ws, bias = (torch.rand(shape, generator=g).to(device) for shape in ((3, 1), (2600, 1), (2600,)))
    for added in (None, bias):
        want = sums.float() * xs * ws.T + (0 if added is None else added)
        assert torch.equal(int8.scale(sums, xs, ws, added, dtype=dtype), want.to(dtype))
    gate, up = (sums.float() * xs * ws.T * 1e-6).to(dtype).float().chunk(2, -1)
    got = int8.scale(sums, xs * 1e-6, ws, None, dtype=dtype, is_gated=True)
    torch.testing.assert_close(got.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=1e-3)


@pytest.mark.interpret
def test_sums_are_scaled_in_the_interpreter():
    check_scaling("cpu", torch.float32)


@pytest.mark.parametrize(("rows", "n", "k", "takes"), [(17, 640, 64, True), (16, 640, 64, False), (17, 644, 64, False)])
def test_what_torch_multiplies(rows, n, k, takes):
    assert int8.int_mm_supports(rows, n, k) == takes


@pytest.fixture
def launched(monkeypatch):
    """Configurations and results of Hopper's ring, which are not computed."""
    from quire.kernels.linear import scaled_hopper

    seen = []
    monkeypatch.setattr(fp8, "streams", lambda x, weight: len(x.data) <= 64)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 132)
    monkeypatch.setattr(scaled_hopper, "launch", lambda x, w, bias, out, config, **how: seen.append((config, out)))
    return seen


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_parts_of_integers_are_integers(rows, launched):
    """Sums in float32 would be rounded twice."""
    n = 512 if rows > 1 else 4096  # one row streams large weights only
    weight, x = drawn(n, 4096, "cpu"), drawn(rows, 4096, "cpu")
    parts = int8.int8_linear_split_k(x, weight, dtype=torch.bfloat16)
    [(config, out)] = launched
    assert out is parts and out.dtype == torch.int32 and out.shape == (config.parts + 2, rows, n) and config.parts > 1


def test_integers_with_a_bias_are_not_in_parts(launched):
    assert fp8.split_k(drawn(2, 4096, "cpu"), drawn(512, 4096, "cpu"), torch.zeros(512), pdl=0) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (512, 1024)], ids=str)
def test_gpu_a_norm_behind_parts_is_that_behind_the_product(shape, rows):
    weight, x = drawn(*shape, "cuda"), drawn(rows, shape[1], "cuda")
    residual = torch.randn(rows, shape[0], device="cuda").bfloat16()
    ones, (ours, plain) = torch.ones(shape[0], device="cuda").bfloat16(), (residual.clone(), residual.clone())
    parts = int8.int8_linear_split_k(x, weight, dtype=torch.bfloat16)
    got = norm.add_rms_norm(parts, ours, ones, 1e-5)
    want = norm.add_rms_norm(int8.int8_linear(x, weight, dtype=torch.bfloat16), plain, ones, 1e-5)
    assert torch.equal(got, want) and torch.equal(ours, plain)
    streams = torch.cuda.get_device_capability() == (9, 0) and (rows > 1 or shape[0] * shape[1] >= current().scaled.ring_weight)
    assert not streams or parts.dim() == 3


@pytest.mark.gpu
def test_gpu_sums_are_scaled():
    check_scaling("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 300, 513, 2048])
def test_gpu_int8_is_the_reference_to_the_bit(rows):
    weight = drawn(640, 4096, "cuda")
    x = drawn(rows, 4096, "cuda")
    sums = (x.data.double() @ weight.data.double().T).float()
    want = (sums * x.scales * weight.scales.T).bfloat16()
    assert torch.equal(int8.int8_linear(x, weight, dtype=torch.bfloat16), want)
