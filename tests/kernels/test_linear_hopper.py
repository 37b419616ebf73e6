"""Linear layers streamed by TMA, against float64 products, and who gets them."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise.norm import add_rms_norm  # noqa: E402
from quire.kernels.linear import linear, split_linear  # noqa: E402
from quire.kernels.triton_support import hopper  # noqa: E402
from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN, mode_for  # noqa: E402
from quire.kernels.tuning.current import using  # noqa: E402
from quire.kernels.tuning.h200 import H200  # noqa: E402

SHAPES = [(1, 8), (100, 72), (640, 520), (200, 1024), (1024, 3072), (4096, 4104), (6144, 4096), (4096, 14336)]  # N, K
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the largest value: one rounding


@pytest.fixture(autouse=True)
def on_an_h200():
    """Its table: what is asserted of choices was measured there."""
    with using(H200):
        yield


@pytest.fixture
def kernel():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from quire.kernels.linear import linear_hopper

    return linear_hopper


def operands(rows, n, k, dtype, device="cuda"):
    g = torch.Generator().manual_seed(rows * 31 + n + k)
    x = torch.randn(rows, k + 8, generator=g).to(device, dtype)[:, :k]  # rows apart
    weight = (torch.randn(n, k, generator=g) / k**0.5).to(device, dtype)
    return x, weight, torch.randn(n, generator=g).to(device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 3, 16, 17, 24, 33, 64])
def test_gpu_products(rows, shape, dtype, kernel):
    n, k = shape
    for is_gated in (False, True):
        x, weight, bias = operands(rows, 2 * n if is_gated else n, k, dtype)
        out = torch.full((rows + 1, n), 7.0, dtype=dtype, device="cuda")
        config = kernel.choose(rows, n, k, 132, is_gated=is_gated)
        use_bias = bias if rows % 2 else None
        kernel.launch(x, weight, use_bias, out[:rows], config, is_gated=is_gated)
        want = x.double() @ weight.double().T + (0 if use_bias is None else bias.double())
        if is_gated:
            gate, up = want.chunk(2, -1)
            want = torch.nn.functional.silu(gate) * up
        assert (out[:rows].double() - want).abs().max() <= TOLERANCE[dtype] * (4 if is_gated else 1) * want.abs().max() + 1e-6
        assert (out[rows] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 24, 64])
def test_gpu_parts(rows, shape, kernel):
    n, k = shape
    x, weight, bias = operands(rows, n, k, torch.bfloat16)
    for parts in (2, 3, 8):
        out = torch.full((parts, rows, n), float("nan"), dtype=torch.float32, device="cuda")
        kernel.launch(x, weight, bias, out, kernel.Config(128, 3, 132, parts))
        want = x.double() @ weight.double().T + bias.double()
        assert (out.double().sum(0) - want).abs().max() <= 1e-5 * want.abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 40])
def test_gpu_any_ring_and_any_number_of_programs_give_the_same(rows, kernel):
    x, weight, bias = operands(rows, 2000, 1000, torch.bfloat16)
    results = []
    for stages, programs in ((2, 1), (3, 7), (8, 132), (2, 264)):
        for is_gated in (False, True):
            out = torch.empty(rows, 1000 if is_gated else 2000, dtype=torch.bfloat16, device="cuda")
            kernel.launch(x, weight, bias, out, kernel.Config(64, stages, programs), is_gated=is_gated)
            results.append(out)
    assert all(torch.equal(out, results[i % 2]) for i, out in enumerate(results))


@pytest.mark.gpu
def test_gpu_a_row_is_the_same_whatever_the_others_hold(kernel):
    x, weight, _ = operands(33, 1024, 2048, torch.bfloat16)
    first = kernel.linear(x, weight, None, None, is_gated=False, pdl=PLAIN)
    x[1:] = float("nan")
    assert torch.equal(kernel.linear(x, weight, None, None, is_gated=False, pdl=PLAIN)[0], first[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 30, 64])
def test_gpu_a_chain_of_dependent_launches_gives_the_same(rows, kernel):
    """Product, gated product, product in parts and norm in turns: each must wait for the one before."""
    x, up, _ = operands(rows, 2048, 1024, torch.bfloat16)
    down = operands(rows, 1024, 1024, torch.bfloat16)[1]
    scale = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    results = []
    for pdl in (PLAIN, LATE, EARLY):
        y, residual = x, torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
        for _ in range(30):
            y = kernel.linear(y, down, None, None, is_gated=False, pdl=pdl)
            y = kernel.linear(y, up, None, None, is_gated=True, pdl=pdl)
            y = add_rms_norm(kernel.linear_split_k(y, down, None, pdl=pdl), residual, scale, 1e-6, pdl=pdl)
        results.append((y, residual))
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])


@pytest.mark.gpu
def test_gpu_few_rows_of_a_layer_come_here(monkeypatch, kernel):
    calls = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args, **kwargs: (calls.append(args[3].shape), launch(*args, **kwargs)))
    x, weight, _ = operands(64, 4096, 4096, torch.bfloat16)
    linear.skinny_linear(x, weight)
    linear.skinny_gated(x, weight)
    assert split_linear.pays(x, weight)
    split_linear.split_linear(x, weight, dependents=True)
    assert [tuple(shape) for shape in calls] == [(64, 4096), (64, 2048), (2, 64, 4096)]
    linear.skinny_linear(operands(65, 64, 64, torch.bfloat16)[0], weight[:64, :64].contiguous())
    linear.skinny_linear(x[:1], weight)
    linear.skinny_linear(x[:3], weight[:1024])
    linear.skinny_linear(x.float(), weight.float())
    assert len(calls) == 3


@pytest.mark.gpu
def test_gpu_what_does_not_fit_is_refused(kernel):
    x, weight, bias = operands(4, 64, 64, torch.bfloat16)
    out = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
    config = kernel.Config(64, 2, 132)
    for args in (
        (x[:, :56], weight, None, out),
        (x, weight, bias[:1], out),
        (x, weight, None, out[:3]),
        (x, weight.half(), None, out),
    ):
        with pytest.raises(ValueError, match="linear_hopper"):
            kernel.launch(*args, config)


# ----------------------------------------------------------------------------------------------------- without a GPU
@pytest.fixture
def fake_gpu(monkeypatch):
    """Sets what the GPU and Triton say of themselves."""

    def fake(capability, version="3.6.0"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(triton, "__version__", version)
        forget()

    def forget():
        from quire.kernels.triton_support import dependent_launch

        hopper.available.cache_clear()
        dependent_launch.supported.cache_clear()
        dependent_launch._max_rows.cache_clear()

    yield fake
    forget()


@pytest.mark.parametrize(
    "version,known", [("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.8.0", False), ("4.0.0", False)]
)
def test_another_triton_takes_the_portable_kernels(version, known, fake_gpu, caplog):
    fake_gpu((9, 0), version)
    assert hopper.available(torch.device("cuda", 0)) is known
    assert known or version in caplog.text


def test_other_devices_take_the_portable_kernels(fake_gpu):
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        fake_gpu(capability)
        assert not hopper.available(torch.device("cuda", 0))
    assert not hopper.available(torch.device("cpu"))


@pytest.mark.parametrize(
    "capability,modes",
    [
        ((9, 0), [EARLY, LATE, LATE, LATE, LATE, PLAIN]),
        ((10, 0), [EARLY, LATE, LATE, PLAIN, PLAIN, PLAIN]),
        ((8, 9), [PLAIN] * 6),
    ],
)
def test_modes_of_dependent_launch_by_rows(capability, modes, fake_gpu):
    fake_gpu(capability)
    assert [mode_for(rows) for rows in (1, 2, 16, 17, 64, 65)] == modes


def test_tma_copies_only_aligned_lines():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert hopper.can_copy(x) and hopper.can_copy(x[:, :32]) and hopper.can_copy(x[:, 8:])
    assert not hopper.can_copy(x[:, 1:]) and not hopper.can_copy(x.T) and not hopper.can_copy(torch.zeros(8, 60).half())


def test_only_16_bit_products_of_2_to_64_rows_are_streamed(monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda device: True)
    x, weight = torch.zeros(65, 64).half(), torch.zeros(4096, 64).half()
    assert [hopper.supports_linear(x[:rows], weight) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert not hopper.supports_linear(x[:8].float(), weight.float()) and not hopper.supports_linear(x[:8], weight.bfloat16())
    assert not hopper.supports_linear(x[:8, :60], weight[:, :60].contiguous())
    few = weight[:1024]
    assert linear.streams(x[:2], weight) and not linear.streams(x[:64], few)
    assert [linear.streams(x[:rows], few, split_k=True) for rows in (2, 4, 5, 64)] == [False, False, True, True]
