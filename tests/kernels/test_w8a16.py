"""8-bit weights with 16-bit activations against float64 products with the dequantized weight."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.linear import w8a16, w8a16_row  # noqa: E402
from quire.kernels.linear.scaled import Config  # noqa: E402
from quire.kernels.linear.w8a16_weight import Weight8, stacked  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN  # noqa: E402

SHAPES = [(5, 64, 64), (33, 448, 448), (130, 160, 32), (6, 320, 128), (7, 640, 256), (9, 192, 64)]  # N, K, group
KINDS = ["int8", "zeros", "fp8"]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def drawn(shape, kind, device, seed=0):
    n, k, group = shape
    g = torch.Generator().manual_seed(n + k + seed)
    data = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    if kind == "fp8":
        data = (torch.randn(n, k, generator=g) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(n, -(-k // group), generator=g) + 0.5) / 74 / k**0.5
    zeros = torch.randint(-128, 129, scales.shape, generator=g, dtype=torch.int16) if kind == "zeros" else None
    return Weight8(data.to(device), scales.to(device), None if zeros is None else zeros.to(device), group)


def by_row(x, weight, bias, out, config, **how):
    config = w8a16_row.choose(out.shape[1], x.shape[1] // 4)
    w8a16_row.launch(x, weight.data, weight.scales, weight.zeros, weight.group, bias, out, config, **how)


def split_k(x, weight, bias, out, config, *, is_gated, pdl):
    parts = torch.full((3, *out.shape), float("nan"), device=x.device)
    w8a16.launch(x, weight, bias, parts, config, is_gated=is_gated, pdl=pdl)
    out.copy_(parts.sum(0))


def compare(rows, shape, kind, dtype, device, gated, config=None, pdl=PLAIN, launch=w8a16.launch):
    n, k, group = shape
    weight = drawn((2 * n if gated else n, k, group), kind, device)
    x = torch.randn(rows, k + 8, generator=torch.Generator().manual_seed(rows)).to(device, dtype)[:, :k]
    bias = torch.randn(len(weight.data)).to(device, dtype) if rows % 2 else None
    out = torch.full((rows + 1, n), 7.0, dtype=dtype, device=device)
    launch(x, weight, bias, out[:rows], config or w8a16.choose(x, n, is_gated=gated), is_gated=gated, pdl=pdl)
    want = x.double() @ weight.dequantized(torch.float64).T + (0 if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert (out[:rows].double() - want).abs().max() <= TOLERANCE[dtype] * (4 if gated else 1) * want.abs().max() + 1e-6
    assert (out[rows] == 7).all()


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 18])
def test_kernel_in_the_interpreter(rows, shape, kind, gated):
    compare(rows, shape, kind, torch.float32, "cpu", gated, Config(32, 32, 4, 1))


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 2600, 2600)], ids=str)
def test_one_row_in_the_interpreter(shape, kind, gated):
    compare(1, shape, kind, torch.float32, "cpu", gated, launch=by_row)


@pytest.mark.interpret
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_in_the_interpreter(shape, kind):
    compare(5, shape, kind, torch.float32, "cpu", False, Config(32, 32, 4, 1), launch=split_k)


@pytest.mark.parametrize(
    ("n", "k", "parts"), [(4096, 4096, 4), (4096, 14336, 4), (28672, 4096, 1), (1024, 3072, 2), (1024, 512, 1)]
)
def test_parts_are_as_many_as_fill_a_gpu(n, k, parts):
    assert w8a16.num_splits(64, n, k, 64, 132) == parts and w8a16.num_splits(65, n, k, 64, 132) == 1


@pytest.mark.interpret
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_is_dequantized_by_the_formula(shape, kind):
    weight = drawn(shape, kind, "cpu")
    got = w8a16.dequantize(weight, torch.empty(weight.data.shape))
    assert torch.equal(got, weight.dequantized())


@pytest.mark.interpret
def test_every_byte_is_its_number():
    weight = Weight8(torch.arange(-128, 128, dtype=torch.int8)[:, None].repeat(1, 16), torch.ones(256, 1), None, 16)
    x = torch.zeros(1, 16)
    x[0, 3] = 1
    out = torch.empty(1, 256)
    for launch in (w8a16.launch, by_row):
        launch(x, weight, None, out, Config(16, 64, 4, 1))
        assert out[0].tolist() == list(range(-128, 128))


def test_outputs_are_stacked_with_or_without_zero_points():
    weights = [drawn((6, 128, 64), kind, "cpu", seed) for seed, kind in enumerate(("int8", "zeros"))]
    assert torch.equal(stacked(weights).dequantized(), torch.cat([w.dequantized() for w in weights]))


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="fit"):
        w8a16.launch(torch.zeros(1, 8), drawn((4, 16, 16), "int8", "cpu"), None, torch.zeros(1, 4), Config(16, 32, 4, 1))
    with pytest.raises(ValueError, match="take 32, 64"):
        w8a16.launch(torch.zeros(1, 96), drawn((4, 96, 48), "int8", "cpu"), None, torch.zeros(1, 4), Config(16, 32, 4, 1))


@pytest.mark.parametrize("gated", [False, True])
def test_no_rows_are_no_work(gated, monkeypatch):
    monkeypatch.setattr(w8a16, "dequantize", None)
    y = w8a16.w8a16_linear(torch.zeros(0, 64), drawn((6, 64, 64), "int8", "cpu"), is_gated=gated)
    assert y.shape == (0, 3 if gated else 6)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES[2:5], (1024, 3072, 128), (4096, 14336, 14336)], ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_gpu_kernel(rows, shape, kind, gated):
    compare(rows, shape, kind, torch.bfloat16, "cuda", gated, pdl=LATE)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("shape", [*SHAPES[2:5], (1024, 3072, 128), (6144, 4096, 4096), (4096, 14336, 128)], ids=str)
def test_gpu_one_row(shape, kind, gated):
    compare(1, shape, kind, torch.bfloat16, "cuda", gated, pdl=LATE, launch=by_row)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_gpu_parts(rows, kind):
    compare(rows, (4096, 14336, 128), kind, torch.bfloat16, "cuda", False, pdl=LATE, launch=split_k)
    weight, x = drawn((4096, 4096, 128), kind, "cuda"), torch.randn(rows, 4096, device="cuda").bfloat16()
    parts, whole = w8a16.w8a16_linear_split_k(x, weight, pdl=LATE), w8a16.w8a16_linear(x, weight).float()
    assert parts.dim() == 3
    torch.testing.assert_close(parts.sum(0), whole, rtol=0.01, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernel_in_float16(kind):
    compare(64, SHAPES[3], kind, torch.float16, "cuda", True)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_many_rows(kind, gated):
    weight = drawn((1024, 4096, 128), kind, "cuda")
    x = torch.randn(300, 4096, device="cuda", dtype=torch.bfloat16)
    dense = weight.dequantized(torch.bfloat16)
    assert torch.equal(w8a16.dequantize(weight, torch.empty_like(dense)), dense)
    want = torch.nn.functional.linear(x, dense)
    if gated:
        gate, up = want.float().chunk(2, -1)
        want = (torch.nn.functional.silu(gate).bfloat16() * up).bfloat16()
    torch.testing.assert_close(w8a16.w8a16_linear(x, weight, is_gated=gated), want, rtol=0.02, atol=0.02)


@pytest.fixture
def ring():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from quire.kernels.linear import w8a16_hopper

    return w8a16_hopper


def compare_ring(ring, rows, shape, kind, dtype, gated, config):
    n, k, group = shape
    weight = drawn((2 * n if gated else n, k, group), kind, "cuda")
    x = torch.randn(rows, k + 8, generator=torch.Generator().manual_seed(rows)).to("cuda", dtype)[:, :k]
    bias = torch.randn(len(weight.data)).to("cuda", dtype) if rows % 2 else None
    want = x.double() @ weight.dequantized(torch.float64).T + (0 if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert ring.supports(x, weight)
    if config.parts > 1:
        out = torch.full((config.parts, rows, n), float("nan"), device="cuda")
        ring.launch(x, weight, bias, out, config)
        got, tolerance = out.double().sum(0), 3e-6
    else:
        out = torch.full((rows + 1, n), 7.0, dtype=dtype, device="cuda")
        ring.launch(x, weight, bias, out[:rows], config, is_gated=gated, pdl=LATE)
        assert (out[rows] == 7).all()
        got, tolerance = out[:rows].double(), TOLERANCE[dtype] * (4 if gated else 1)
    assert (got - want).abs().max() <= tolerance * want.abs().max() + 1e-6


RING_SHAPES = [(33, 448, 448), (130, 160, 32), (6, 320, 128), (96, 640, 64), (1024, 3072, 128), (4096, 14336, 14336)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", RING_SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 17, 64])
def test_gpu_ring(rows, shape, kind, gated, dtype, ring):
    n, k, _ = shape
    compare_ring(ring, rows, shape, kind, dtype, gated, ring.choose(rows, n, k, 132, is_gated=gated))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [(4, 2, 3, 500, 1), (8, 1, 4, 40, 1), (8, 2, 2, 132, 1), (4, 2, 3, 7, 1), (4, 1, 4, 264, 4)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 33])
def test_gpu_configurations_of_the_ring(rows, kind, config, ring):
    for gated in (False, True) if config[-1] == 1 else (False,):
        compare_ring(ring, rows, (1000, 2048, 64), kind, torch.bfloat16, gated, ring.Config(*config))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_gpu_every_byte_is_its_number_in_the_ring(kind, rows, dtype, ring):
    data = torch.arange(-128, 128, dtype=torch.int8, device="cuda")[:, None].repeat(1, 128)
    data = data.view(torch.float8_e4m3fn) if kind == "fp8" else data
    weight = Weight8(data, torch.ones(256, 1, device="cuda"), None, 128)
    x = torch.zeros(rows, 128, device="cuda", dtype=dtype)
    x[:, 77] = 1
    out = torch.empty(rows, 256, device="cuda", dtype=dtype)
    ring.launch(x, weight, None, out, ring.choose(rows, 256, 128, 132))
    want = data[:, 77].float()
    assert torch.equal(out[0].float()[want.isfinite()], want[want.isfinite()])
    assert torch.equal(out.view(torch.int16), out[:1].view(torch.int16).expand(out.shape))  # NaN too
