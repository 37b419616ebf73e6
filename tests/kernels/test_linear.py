"""Skinny linear layers against float64 products."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels import linear  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 96), (130, 257), (33, 1030)]  # N, K
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the result's largest value: one rounding


def operands(rows, n, k, dtype, device):
    g = torch.Generator().manual_seed(rows * 31 + n + k)
    x = torch.randn(rows, k + 8, generator=g).to(device, dtype)[:, :k]  # rows apart
    return x, torch.randn(n, k, generator=g).to(device, dtype), torch.randn(n, generator=g).to(device, dtype)


def compare(rows, n, k, dtype, device, use_bias, config=None):
    x, weight, bias = operands(rows, n, k, dtype, device)
    out = torch.full((rows + 1, n), 7.0, dtype=dtype, device=device)
    linear.launch_skinny(x, weight, bias if use_bias else None, out[:rows], config or linear.choose(rows, n, k))
    want = x.double() @ weight.double().T + (bias.double() if use_bias else 0)
    assert (out[:rows].double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() + 1e-6
    assert (out[rows] == 7).all()  # nothing behind the rows


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16])
def test_kernels_in_the_interpreter(rows, shape):
    compare(rows, *shape, torch.float32, "cpu", use_bias=rows % 2 == 1)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    x, weight, _ = operands(2, 4, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="fit"):
        linear.launch_skinny(x, weight, None, torch.zeros(2, 5), linear.choose(2, 4, 8))
    with pytest.raises(ValueError, match="fit"):
        linear.launch_skinny(torch.zeros(17, 8), weight, None, torch.zeros(17, 4), linear.choose(16, 4, 8))
    with pytest.raises(ValueError, match="dtype"):
        linear.launch_skinny(x, weight.half(), None, torch.zeros(2, 4), linear.choose(2, 4, 8))


def test_what_is_not_skinny_goes_to_torch():
    x, weight, bias = operands(17, 4, 8, torch.float32, "cpu")
    want = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(linear.skinny_linear(x, weight, bias), want)
    out = torch.empty_like(want)
    assert linear.skinny_linear(x, weight, bias, out) is out
    assert torch.equal(out, want)
    assert linear.skinny_linear(x[:0], weight).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_kernels(rows, shape, dtype):
    compare(rows, *shape, dtype, "cuda", use_bias=rows % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_row_is_the_same_beside_other_rows(rows):
    x, weight, _ = operands(rows, 300, 1024, torch.bfloat16, "cuda")
    together = linear.skinny_linear(x, weight)
    other = x.clone()
    other[1:] = 3.0
    assert torch.equal(linear.skinny_linear(other, weight)[0], together[0])


@pytest.mark.gpu
def test_programmatic_dependent_launch_gives_the_same():
    x, weight, _ = operands(2, 512, 512, torch.bfloat16, "cuda")
    weight *= 0.02
    y, want = x, x
    for _ in range(30):
        y, want = linear.skinny_linear(y, weight, pdl=True), linear.skinny_linear(want, weight)
    assert torch.equal(y, want)
