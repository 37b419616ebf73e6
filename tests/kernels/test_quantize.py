"""Activations in 8 bits, against the formula on what norm and SiLU times up would have stored."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import activation_cpu, norm, norm_reference  # noqa: E402
from quire.kernels.linear import quantize as q  # noqa: E402

KINDS = [torch.float8_e4m3fn, torch.int8]
WIDTHS = [64, 200, 448, 2600]


def numbers(got, want):
    """got's in float32, put right where Triton's interpreter casts to e4m3: it loses a rounding's carry (126 is 64), and rounds
    what is below 2^-6 to another neighbour."""
    data, meant = got.data.float(), want.data.float()
    is_lost = (data * 2 == meant) & (meant.abs().log2() % 1 == 0) | (meant.abs() <= 2**-6) & ((data - meant).abs() <= 2**-9)
    return torch.where(is_lost, meant, data) if data.device.type == "cpu" else data


def assert_same(got, want):
    """But for a number that lies halfway, within the last bits of what comes before."""
    assert got.data.shape == want.data.shape and got.scales.shape == want.scales.shape
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0)
    data = numbers(got, want)
    differ = data != want.data.float()
    assert differ.float().mean() <= 0.02
    torch.testing.assert_close(data, want.data.float(), rtol=0.13, atol=1.0 if want.data.dtype == torch.int8 else 0.01)


def rows(count, width, device, dtype, seed=0):
    g = torch.Generator().manual_seed(width + seed)
    x = torch.randn(count, width + 8, generator=g) * torch.logspace(-2, 1, count)[:, None]
    return x.to(device, dtype)[:, :width]


def check_plain(width, kind, by_block, device, dtype):
    x = rows(5, width, device, dtype)
    x[3], x[0] = 0, x[0] * 2.0**-90  # so little that the scale's reciprocal would be too large
    got = q.quantize(x, kind, by_block=by_block)
    want = q.quantize_reference(x, kind, by_block=by_block)
    assert torch.equal(got.scales, want.scales) and torch.equal(numbers(got, want), want.data.float())
    static = torch.tensor([0.002], device=device)  # so small that much of x lies beyond
    got, want = (f(x, kind, static_scale=static) for f in (q.quantize, q.quantize_reference))
    assert torch.equal(numbers(got, want), want.data.float()) and torch.equal(got.scales, want.scales)
    assert got.data.float().abs().max() == q.LARGEST[kind]


def check_silu(width, kind, by_block, device, dtype):
    x = rows(3, 2 * width, device, dtype)
    got = q.silu_mul_quantize(x, kind, by_block=by_block)
    want = q.quantize_reference(activation_cpu.silu_mul(x), kind, by_block=by_block)
    assert_same(got, want)


def check_norm(width, kind, by_block, device, dtype):
    weight = rows(1, width, device, dtype, seed=3)[0].contiguous()
    x, residual = rows(4, width, device, dtype), rows(4, width, device, dtype, seed=1).contiguous()
    want_sum = residual + x
    got = q.rms_norm_quantize(x, residual, weight, 1e-5, kind, by_block=by_block)
    assert torch.equal(residual, want_sum)
    want = q.quantize_reference(norm_reference.rms_norm(want_sum, weight, 1e-5), kind, by_block=by_block)
    assert_same(got, want)
    got = q.rms_norm_quantize(None, residual, weight, 1e-5, kind, by_block=by_block)
    assert_same(got, want)
    parts = torch.stack([x.float(), x.float()])
    q.rms_norm_quantize(parts, residual, weight, 1e-5, kind, by_block=by_block)
    torch.testing.assert_close(residual.float(), (want_sum.float() + 2 * x.float()).to(dtype).float())


CHECKS = [check_plain, check_silu, check_norm]


@pytest.mark.interpret
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernels_in_the_interpreter(width, kind, by_block, check):
    check(width, kind, by_block, "cpu", torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_is_the_same_whatever_the_others_hold(kind):
    x = rows(4, 256, "cpu", torch.float32)
    first = q.quantize(x, kind)
    x[1:] *= 1000
    second = q.quantize(x, kind)
    assert torch.equal(first.data[0].float(), second.data[0].float()) and first.scales[0] == second.scales[0]


def test_the_formula():
    x = torch.tensor([[448.0, -224.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    got = q.quantize_reference(x, torch.float8_e4m3fn)
    assert got.scales.tolist() == [[1.0], [1.0]] and got.data[0].float().tolist() == [448, -224, 1, 0]
    got = q.quantize_reference(torch.tensor([[127.0, 0.5, 1.5, -127.0]]), torch.int8)
    assert got.data.tolist() == [[127, 0, 2, -127]]


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="not computed"):
        q.quantize(torch.zeros(1, 8), torch.float16)
    with pytest.raises(ValueError, match="fit"):
        q.rms_norm_quantize(torch.zeros(1, 8), torch.zeros(2, 8), torch.zeros(8), 1e-5, torch.int8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, 4096, 14336])
def test_gpu_kernels(width, kind, by_block, check, dtype):
    check(width, kind, by_block, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("by_block", [False, True])
def test_gpu_norm_in_8_bits_is_the_norm_quantized(by_block):
    x, weight = rows(64, 4096, "cuda", torch.bfloat16), rows(1, 4096, "cuda", torch.bfloat16)[0].contiguous()
    got = q.rms_norm_quantize(None, x.contiguous(), weight, 1e-5, torch.float8_e4m3fn, by_block=by_block)
    want = q.quantize(norm.rms_norm(x, weight, 1e-5), torch.float8_e4m3fn, by_block=by_block)
    assert torch.equal(got.data.float(), want.data.float()) and torch.equal(got.scales, want.scales)
