"""Skinny linear layers, plain and gated, against float64 products."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise.norm import rms_norm  # noqa: E402
from quire.kernels.linear import linear  # noqa: E402
from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN  # noqa: E402
from quire.kernels.tuning.configs import SkinnyConfig  # noqa: E402

SLOW = pytest.mark.slow
SHAPES = [(1, 1), (3, 5), (64, 96), (130, 257), (33, 1030)]  # N, K
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 5e-3,
}  # of the result's largest value: one rounding; sums of 1,030
VECTOR, DOT = SkinnyConfig(False, 2, 64, 4), SkinnyConfig(True, 16, 32, 4, 3)


def operands(rows, n, k, dtype, device):
    g = torch.Generator().manual_seed(rows * 31 + n + k)
    x = torch.randn(rows, k + 8, generator=g).to(device, dtype)[:, :k]  # rows apart
    weight = torch.randn(n, k, generator=g) / k**0.5
    return x, weight.to(device, dtype), torch.randn(n, generator=g).to(device, dtype)


def reference(x, weight, bias, gated):
    """In float64; what the kernels round on the way is left alone."""
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def compare(rows, n, k, dtype, device, use_bias, config, gated=False, pdl=PLAIN):
    x, weight, bias = operands(rows, 2 * n if gated else n, k, dtype, device)
    bias = bias if use_bias else None
    out = torch.full((rows + 1, n), 7.0, dtype=dtype, device=device)
    linear.launch_skinny(x, weight, bias, out[:rows], config, is_gated=gated, pdl=pdl)
    want = reference(x, weight, bias, gated)
    tolerance = TOLERANCE[dtype] * (4 if gated else 1)  # silu, gate and up are rounded, too
    assert (out[:rows].double() - want).abs().max() <= tolerance * want.abs().max() + 1e-6
    assert (out[rows] == 7).all()  # nothing behind the rows


def configurations(rows, n, k, gated):
    found = [DOT] if rows > linear.MAX_VECTOR_ROWS else [VECTOR, DOT]
    return [*found, linear.choose(rows, n, k, gated)]


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW), 5, 16])
def test_kernels_in_the_interpreter(rows, shape, gated):
    for config in configurations(rows, *shape, gated):
        compare(rows, *shape, torch.float32, "cpu", rows % 2 == 1, config, gated)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    x, weight, _ = operands(2, 4, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="fit"):
        linear.launch_skinny(x, weight, None, torch.zeros(2, 5), VECTOR)
    with pytest.raises(ValueError, match="fit"):
        linear.launch_skinny(x, weight, None, torch.zeros(2, 4), VECTOR, is_gated=True)
    with pytest.raises(ValueError, match="fit"):
        linear.launch_skinny(torch.zeros(17, 8), weight, None, torch.zeros(17, 4), DOT)
    with pytest.raises(ValueError, match="tensor cores"):
        linear.launch_skinny(torch.zeros(5, 8), weight, None, torch.zeros(5, 4), VECTOR)
    with pytest.raises(ValueError, match="dtype"):
        linear.launch_skinny(x, weight.half(), None, torch.zeros(2, 4), VECTOR)


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
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16])
def test_kernels(rows, shape, gated, dtype):
    for config in configurations(rows, *shape, gated):
        compare(rows, *shape, dtype, "cuda", rows % 2 == 1, config, gated, pdl=LATE if dtype == torch.bfloat16 else PLAIN)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_kernels_at_the_sizes_of_models(rows, shape, gated):
    config = linear.choose(rows, *shape, gated)
    compare(rows, *shape, torch.bfloat16, "cuda", False, config, gated)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_rows_of_both_ways_agree(rows, gated):
    """By cuBLAS for many rows, by our kernels for few; gated in one kernel or in two."""
    x, weight, bias = operands(rows, 512, 1024, torch.bfloat16, "cuda")
    y = (linear.skinny_gated if gated else linear.skinny_linear)(x, weight, bias)
    want = reference(x, weight, bias, gated)
    assert (y.double() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_row_is_the_same_beside_other_rows(rows):
    x, weight, _ = operands(rows, 300, 1024, torch.bfloat16, "cuda")
    other = x.clone()
    other[1:] = 3.0
    assert torch.equal(linear.skinny_linear(other, weight)[0], linear.skinny_linear(x, weight)[0])
    assert torch.equal(linear.skinny_gated(other, weight)[0], linear.skinny_gated(x, weight)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "mode"), [(1, EARLY), (1, LATE), (2, LATE), (4, EARLY), (16, LATE)])
def test_programmatic_dependent_launch_gives_the_same(rows, mode):
    x, weight, _ = operands(rows, 1024, 1024, torch.bfloat16, "cuda")
    _, wide, _ = operands(rows, 2048, 1024, torch.bfloat16, "cuda")
    ones = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    results = []
    for pdl in (PLAIN, mode):
        y = x
        for _ in range(30):  # a chain, each link reading what the one before it wrote; normalised, or it would soon be inf or 0
            y = linear.skinny_gated(linear.skinny_linear(y, weight, pdl=pdl), wide, pdl=pdl)
            y = rms_norm(linear.skinny_linear(y, weight, pdl=pdl), ones, 1e-6, pdl=pdl)
        results.append(y)
    assert torch.equal(*results)
    assert 0.9 < results[0].float().pow(2).mean() < 1.1
