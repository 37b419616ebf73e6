"""Addition, norm and product of one row in one kernel, against the three of them."""

import pytest
import torch

from quire.kernels.elementwise import norm_reference

triton = pytest.importorskip("triton")

from quire.kernels.linear import norm_linear as fused  # noqa: E402
from quire.kernels.triton_support.dependent_launch import EARLY, PLAIN  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 96), (33, 1030)]  # N, K
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(columns, k, dtype, device):
    g = torch.Generator().manual_seed(columns + k)
    x, residual = (torch.randn(1, k, generator=g).to(device, dtype) for _ in range(2))
    norm_weight = (torch.randn(k, generator=g) + 1).to(device, dtype)
    weight = (torch.randn(columns, k, generator=g) / k**0.5).to(device, dtype)
    return x, residual, norm_weight, weight, torch.randn(columns, generator=g).to(device, dtype)


def parts(x, residual, norm_weight, weight, bias, is_gated):
    """The same by the references, the product in float64."""
    total = residual if x is None else residual + x
    h = norm_reference.rms_norm(total, norm_weight, 1e-6)
    y = h.double() @ weight.double().T + (0 if bias is None else bias.double())
    if is_gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y, total


def compare(n, k, dtype, device, is_gated, adds, mode=PLAIN):
    x, residual, norm_weight, weight, bias = operands(2 * n if is_gated else n, k, dtype, device)
    x, bias = (x, bias) if adds else (None, None)
    before = residual.clone()
    want, total = parts(x, residual, norm_weight, weight, bias, is_gated)
    got, got_total = fused.norm_linear(x, residual, norm_weight, 1e-6, weight, bias, is_gated=is_gated, pdl=mode)
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() + 1e-6
    assert torch.equal(got_total, total)
    assert torch.equal(residual, before)


@pytest.mark.interpret
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_in_the_interpreter(shape, is_gated, adds):
    compare(*shape, torch.float32, "cpu", is_gated, adds)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    x, residual, norm_weight, weight, _ = operands(4, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="fit"):
        fused.norm_linear(x.expand(2, 8), residual.expand(2, 8), norm_weight, 1e-6, weight, None)
    with pytest.raises(ValueError, match="fit"):
        fused.norm_linear(x, residual, norm_weight[:7], 1e-6, weight, None)
    with pytest.raises(TypeError, match="dtype"):
        fused.norm_linear(x.half(), residual, norm_weight, 1e-6, weight, None)
    assert not fused.pays(residual, weight)  # float32
    assert fused.pays(residual.half(), weight.half())
    assert not fused.pays(residual.half().expand(2, 8), weight.half())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (3072, 1024), (512, 4096)])
def test_kernel(shape, is_gated, adds, dtype):
    compare(*shape, dtype, "cuda", is_gated, adds, EARLY if dtype == torch.bfloat16 else PLAIN)


@pytest.mark.gpu
def test_a_chain_of_dependents_gives_the_same():
    x, residual, norm_weight, weight, _ = operands(1024, 1024, torch.bfloat16, "cuda")
    y, total, want, want_total = x, residual, x, residual
    for _ in range(50):  # each link reads what the two before it wrote
        y, total = fused.norm_linear(y, total, norm_weight, 1e-6, weight, None, pdl=EARLY)
        want, want_total = fused.norm_linear(want, want_total, norm_weight, 1e-6, weight, None)
    assert torch.equal(y, want)
    assert torch.equal(total, want_total)
