"""Inputs to 8 bits and their product in one kernel, against the two in turn."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import activation_cpu, norm_reference  # noqa: E402
from quire.kernels.linear import scaled_fused  # noqa: E402
from quire.kernels.linear.quantize import quantize_reference  # noqa: E402
from quire.kernels.linear.scaled import Scaled  # noqa: E402
from quire.kernels.tuning.current import using  # noqa: E402
from quire.kernels.tuning.default import DEFAULT  # noqa: E402
from quire.kernels.tuning.h200 import H200  # noqa: E402

KINDS = [torch.float8_e4m3fn, torch.int8]
SHAPES = [(5, 64), (130, 448), (256, 384)]  # N, K
WEIGHTS = [(2048, 1024), (4096, 4096), (6144, 4096), (4096, 14336)]


def drawn(shape, kind, scaling, device):
    n, k = shape
    g = torch.Generator().manual_seed(n + k)
    data = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)
    if kind != torch.int8:
        data = (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(kind)
    grid = (-(-n // 128), -(-k // 128)) if scaling == "block" and k > 128 else (n, 1)
    scales = torch.rand(grid, generator=g) / 1000
    return Scaled(data.to(device), scales.to(device), 128 if grid[1] > 1 else 1)


def compare(shape, kind, scaling, device, dtype, tolerance):
    (n, k), weight = shape, drawn(shape, kind, scaling, device)
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(1, k, generator=g).to(device, dtype) for _ in range(2))
    gate_up = torch.randn(1, 2 * k, generator=g).to(device, dtype)
    norm_weight = torch.rand(k, generator=g).to(device, dtype)
    bias = torch.randn(n, generator=g).to(device, dtype)
    by_block = scaling == "block"
    static = torch.tensor([0.01], device=device) if scaling == "static" else None
    how = {"by_block": by_block, "static_scale": static}
    call = {"dtype": dtype, **how}

    def want(y, added=None):
        q = quantize_reference(y, kind, **how)
        out = q.dequantized(torch.float64) @ weight.dequantized(torch.float64).T
        return out if added is None else out + added.double()

    def near(got, want):
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max() + 1e-6

    near(scaled_fused.fused_linear(x, weight, bias, **call)[0], want(x, bias))
    got, none = scaled_fused.fused_linear(gate_up, weight, is_gate_up=True, **call)
    near(got, want(activation_cpu.silu_mul(gate_up)))
    assert none is None
    before = residual.clone()
    for added in (None, x):
        got, total = scaled_fused.fused_linear(added, weight, norm=(residual, norm_weight, 1e-5), **call)
        summed = residual if added is None else residual + x
        assert torch.equal(total, summed) and torch.equal(residual, before)
        near(got, want(norm_reference.rms_norm(summed, norm_weight, 1e-5)))


@pytest.mark.interpret
@pytest.mark.parametrize("scaling", ["row", "block", "static"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_in_the_interpreter(shape, kind, scaling):
    """fp8 with a wide tolerance: some of its casts are wrong there."""
    compare(shape, kind, scaling, "cpu", torch.float32, 1e-5 if kind == torch.int8 else 0.2)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    weight = drawn((4, 64), torch.int8, "row", "cpu")
    with pytest.raises(ValueError, match="fit"):
        scaled_fused.fused_linear(torch.zeros(2, 64), weight, dtype=torch.float32)
    with pytest.raises(ValueError, match="dtype"):
        scaled_fused.fused_linear(torch.zeros(1, 64), weight, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["row", "block", "static"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 1024), (1024, 3072), (4096, 4096)], ids=str)
def test_gpu_kernel(shape, kind, scaling):
    with using(H200):
        compare(shape, kind, scaling, "cuda", torch.bfloat16, 0.02)


def test_what_is_one_kernel_is_the_tables_choice():
    """o_proj of an 8B is, on an H200; its qkv_proj and down_proj are not."""
    for table, o_proj in ((DEFAULT, False), (H200, True)):
        with using(table):
            found = [scaled_fused.pays(1, drawn(shape, torch.int8, "row", "meta")) for shape in WEIGHTS]
        assert found == [True, o_proj, False, False]


@pytest.mark.gpu
def test_gpu_int8_is_the_reference_to_the_bit():
    weight, x = drawn((640, 4096), torch.int8, "row", "cuda"), torch.randn(1, 4096, device="cuda").bfloat16()
    q = quantize_reference(x, torch.int8)
    sums = (q.data.double() @ weight.data.double().T).float()
    got, _ = scaled_fused.fused_linear(x, weight, dtype=torch.bfloat16)
    assert torch.equal(got, (sums * q.scales * weight.scales.T).bfloat16())
