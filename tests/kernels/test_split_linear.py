"""Products in parts, and the norm that adds them up, against float64."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import norm, norm_reference  # noqa: E402
from quire.kernels.linear import split_linear  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN  # noqa: E402
from quire.kernels.tuning.configs import SplitConfig  # noqa: E402
from quire.kernels.tuning.current import using  # noqa: E402
from quire.kernels.tuning.h200 import H200  # noqa: E402

CONFIGS = [SplitConfig(1, 16, 32, 4, 2), SplitConfig(3, 16, 32, 4, 3), SplitConfig(4, 32, 64, 2, 2)]
SHAPES = [(1, 1), (33, 70), (64, 257), (100, 1030)]  # N, K
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-5, torch.bfloat16: 1e-5}  # parts are not rounded


@pytest.fixture(autouse=True)
def on_an_h200():
    """Its table: what is asserted of choices was measured there."""
    with using(H200):
        yield


def operands(rows, n, k, dtype, device):
    g = torch.Generator().manual_seed(rows * 31 + n + k)
    x = torch.randn(rows, k + 8, generator=g).to(device, dtype)[:, :k]  # rows apart
    weight = (torch.randn(n, k, generator=g) / k**0.5).to(device, dtype)
    return x, weight, torch.randn(n, generator=g).to(device, dtype)


def compare(rows, n, k, dtype, device, config, use_bias, dependents=False):
    x, weight, bias = operands(rows, n, k, dtype, device)
    parts = split_linear.split_linear(x, weight, bias if use_bias else None, config, dependents=dependents)
    assert parts.dtype == torch.float32 and parts.shape[1:] == (rows, n)
    want = x.double() @ weight.double().T + (bias.double() if use_bias else 0)
    assert (parts.double().sum(0) - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() + 1e-6


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 40])
def test_parts_in_the_interpreter(rows, shape):
    for config in CONFIGS:
        compare(rows, *shape, torch.float32, "cpu", config, rows % 2 == 1)


def compare_norm(rows, width, parts, dtype, device, pdl=PLAIN):
    g = torch.Generator().manual_seed(width)
    x = torch.randn(parts, rows, width, generator=g).to(device)
    residual, weight = (
        torch.randn(rows, width, generator=g).to(device, dtype),
        torch.randn(width, generator=g).to(device, dtype),
    )
    ours, theirs = residual.clone(), residual.clone()
    y = norm.add_rms_norm(x, ours, weight, 1e-6, pdl=pdl)
    want = norm_reference.add_rms_norm(x.sum(0).to(dtype), theirs, weight, 1e-6)
    tolerance = {torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
    assert y.dtype == dtype


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 1, 1), (3, 67, 2), (2, 128, 4), (5, 33, 3)])
def test_a_norm_adds_up_parts_in_the_interpreter(rows, width, parts):
    compare_norm(rows, width, parts, torch.float32, "cpu")


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    x, weight, _ = operands(2, 4, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="fit"):
        split_linear.split_linear(x[:, :7], weight, dependents=False)
    with pytest.raises(ValueError, match="fit"):
        split_linear.split_linear(torch.zeros(65, 8), weight, dependents=False)
    with pytest.raises(ValueError, match="dtype"):
        split_linear.split_linear(x.half(), weight, dependents=False)
    with pytest.raises(TypeError, match="float32"):
        norm.add_rms_norm(torch.zeros(2, 3, 4).half(), torch.zeros(3, 4), torch.zeros(4), 1e-6)


def test_only_some_rows_of_small_weights_come_in_parts():
    x, small, large = torch.zeros(64, 2048).half(), torch.zeros(1024, 2048).half(), torch.zeros(4096, 2048).half()
    assert split_linear.pays(x, small) and split_linear.pays(x[:17], small)
    assert not split_linear.pays(x[:16], small) and not split_linear.pays(torch.zeros(401, 2048).half(), small)
    assert not split_linear.pays(x, large) and not split_linear.pays(x.float(), small.float())


def test_more_rows_come_as_a_batch_where_tiles_are_few():
    sizes = (64, 65, 160, 161, 400, 401)
    assert [split_linear.batched_splits(rows, 1024, 3072) for rows in sizes] == [0, 4, 4, 2, 2, 0]
    assert [split_linear.batched_splits(rows, 4096, 14336) for rows in (112, 113, 304, 305)] == [0, 2, 2, 0]
    assert not split_linear.batched_splits(200, 6144, 4096) and not split_linear.batched_splits(200, 4096, 4104)
    rows = torch.zeros(200, 4096).half()
    assert split_linear.pays(rows, torch.zeros(4096, 4096).half())
    assert not split_linear.pays(torch.zeros(200, 8192).half()[:, :4096], torch.zeros(4096, 4096).half())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 2048), (1024, 3072)])
@pytest.mark.parametrize("rows", [1, 17, 32, 33, 64])
def test_parts(rows, shape, dtype):
    compare(rows, *shape, dtype, "cuda", None, rows % 2 == 1, dependents=rows > 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 2048), (1000, 3072), (4096, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [113, 144, 161, 299])
@pytest.mark.parametrize("use_bias", [False, True])
def test_parts_as_a_batch(rows, shape, dtype, use_bias):
    x, weight, bias = operands(rows, *shape, dtype, "cuda")
    x = x.contiguous()
    assert split_linear.pays(x, weight)
    parts = split_linear.split_linear(x, weight, bias if use_bias else None, dependents=True)
    assert parts.dtype == torch.float32 and parts.shape == (split_linear.batched_splits(rows, *shape), rows, shape[0])
    want = x.double() @ weight.double().T + (bias.double() if use_bias else 0)
    assert (parts.double().sum(0) - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 1, 1), (3, 67, 2), (64, 1024, 4), (64, 1000, 3)])
def test_a_norm_adds_up_parts(rows, width, parts, dtype):
    compare_norm(rows, width, parts, dtype, "cuda", pdl=LATE if rows > 3 else PLAIN)


@pytest.mark.gpu
def test_a_chain_of_dependent_launches_gives_the_same():
    x, weight, _ = operands(48, 1024, 1024, torch.bfloat16, "cuda")
    scale = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    results = []
    for pdl in (PLAIN, LATE):
        y, residual = x, torch.zeros(48, 1024, dtype=torch.bfloat16, device="cuda")
        for _ in range(30):
            parts = split_linear.split_linear(y, weight, dependents=pdl == LATE)
            y = norm.add_rms_norm(parts, residual, scale, 1e-6, pdl=pdl)
        results.append((y, residual))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
