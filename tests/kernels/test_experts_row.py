"""Experts of very few rows on mma: the kernels' source on the CPU (`gluon_emulator`), and on a GPU against the CPU path."""

import itertools

import pytest
import torch
from experts_cases import CLAMPED, DEEPSEEK, GPT_OSS, QWEN, TOLERANCE, check_dependent_launches

pytest.importorskip("triton.experimental.gluon")

from gluon_emulator import Emulator

from quire.kernels.experts import experts_reference, four_bits_row, four_bits_warp, pairs_row, scaled_row
from quire.kernels.experts.experts_reference import SwiGLU, Weights
from quire.kernels.experts.four_bits_weight import FourBitWeights, new_int, new_mx, put_mx, unpack
from quire.kernels.experts.scaled_weight import ScaledExperts, ScaledWeights
from quire.kernels.linear.quantize import quantize_reference
from quire.kernels.tuning.configs import RowConfig

BF16 = torch.bfloat16
# rows, hidden, intermediate, experts, top k
SHAPES = [(1, 32, 32, 1, 1), (2, 160, 96, 5, 2), (1, 64, 160, 9, 8), (1, 416, 32, 6, 6), (3, 32, 160, 4, 3)]
LONG = (1, 1184, 32, 2, 1)  # two turns of a warp's eight blocks
FORMS = ["mx", "mx-wide", 32, 64, 128, 0]
EMULATED = ("_gate_up_kernel", "_down_kernel")


@pytest.fixture
def emulated(monkeypatch):
    for module, name in itertools.product((four_bits_row, pairs_row, scaled_row), EMULATED):
        monkeypatch.setattr(module, name, Emulator(getattr(module, name)))
    for name in ("gate_up_kernel", "down_kernel"):
        monkeypatch.setattr(four_bits_warp, name, Emulator(getattr(four_bits_warp, name)))


def assert_close(got, want, times=1):
    assert got.dtype == want.dtype and (got - want).abs().max() <= times * TOLERANCE[BF16] * max(1.0, want.abs().max().item())


def four_bits_of(form, shape, device):
    """Random; form: mx, mx-wide with scales that no byte holds, groups of so many, zero points where these are even."""
    experts, n, k = shape
    if isinstance(form, str):
        weight = new_mx(*shape, device)
        high = 160 if form == "mx-wide" else 122
        exponents = torch.randint(high - 10, high, (experts, n, k // 32), dtype=torch.uint8, device=device)
        put_mx(
            weight,
            slice(None),
            slice(None),
            torch.randint(256, (experts, n, k // 2), dtype=torch.uint8, device=device),
            exponents,
        )
        return weight
    weight = new_int(*shape, form, torch.float32, device)
    weight.words.random_(-(2**31), 2**31 - 1)
    scales = torch.rand(weight.scales.shape, device=device) / (4 * k**0.5)
    if form == 64:
        return weight._replace(scales=scales.bfloat16(), zeros=None)
    return weight._replace(scales=scales, zeros=torch.randint_like(weight.zeros, 17))


def routed(shape, device, dtype):
    """x, whose rows are apart, ids, their weights, what is added."""
    rows, hidden, _, num_experts, top_k = shape
    x = torch.randn(rows, hidden + 8, device=device).to(dtype)[:, :hidden]
    ids = torch.stack([torch.randperm(num_experts, device=device)[:top_k] for _ in range(rows)]).int()
    return x, ids, torch.rand(rows, top_k, device=device), torch.randn(rows, hidden, device=device).to(dtype)


def biases(shape, device, dtype):
    _, hidden, inner, num_experts, _ = shape
    return [torch.randn(num_experts, n, device=device).to(dtype) / 2 if shape[0] % 2 else None for n in (2 * inner, hidden)]


def compare_four(shape, form, warps, device, **options):
    torch.manual_seed(sum(shape))
    _, hidden, inner, num_experts, _ = shape
    x, ids, weights, shared = routed(shape, device, BF16)
    both = [four_bits_of(form, (num_experts, *size), device) for size in ((2 * inner, hidden), (hidden, inner))]
    added = biases(shape, device, BF16)
    w, plain = FourBitWeights(*both, *added), Weights(*(unpack(each, torch.float64) for each in both), *added)
    act = CLAMPED if shape[0] % 2 else SwiGLU()
    plain = Weights(*(None if each is None else each.float() for each in plain))
    for add in (None, shared):
        got = four_bits_row.experts(x, w, ids, weights, act, add, RowConfig(8, *warps, 3, 3, 2), **options)
        want = experts_reference.experts(x.float(), plain, ids, weights, act, None if add is None else add.float())
        assert_close(got, want.to(BF16))


def compare_sixteen(shape, warps, ahead, device, held=0, dtype=BF16, **options):
    torch.manual_seed(sum(shape))
    _, hidden, inner, num_experts, _ = shape
    x, ids, weights, shared = routed(shape, device, dtype)
    sizes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    w = Weights(
        *((torch.randn(size, device=device) / size[2] ** 0.5).to(dtype) for size in sizes), *biases(shape, device, dtype)
    )
    if held:
        w, ids = Weights(*(None if each is None else each[:held].contiguous() for each in w)), ids.clamp(max=held)
    act = CLAMPED if shape[0] % 2 else SwiGLU()
    h = pairs_row.gate_up(x, w, ids, act, warps, ahead, held=held, **options)
    for add in (None, shared):
        got = pairs_row.down(h, w, ids, weights, add, warps, ahead, held=held, **options)
        assert_close(got, experts_reference.experts(x, w, ids, weights, act, add, num_routed=num_experts if held else 0))


def compare_scaled(shape, small, by_block, config, device, **options):
    """Beside the CPU path on the dequantized weights, x and h rounded to 8 bits as they are for the kernels."""
    torch.manual_seed(sum(shape))
    _, hidden, inner, num_experts, _ = shape
    x, ids, weights, shared = routed(shape, device, BF16)
    added, both = biases(shape, device, BF16), []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        numbers = torch.randn(num_experts, n, k, device=device) * 40
        data = numbers.clamp(-127, 127).round().to(small) if small == torch.int8 else numbers.to(small)
        scales = torch.rand(num_experts, -(-k // 128) if by_block else 1, n, device=device) / (40 * k**0.5)
        both.append(ScaledExperts(data, scales, by_block))
    w, act = ScaledWeights(*both, *added), CLAMPED if shape[0] % 2 else SwiGLU()
    plain = Weights(*(each.dequantized() for each in both), *(None if each is None else each.float() for each in added))
    quantized = quantize_reference(x, small, by_block=by_block)
    h = scaled_row.gate_up(quantized, w, ids, act, config, BF16, **options)
    h8 = quantize_reference(h, small, by_block=by_block)
    for add in (None, shared):
        got = scaled_row.down(h8, w, ids, weights, add, config, BF16, **options)
        wide = None if add is None else add.float()
        want = experts_reference.experts(quantized.dequantized().float(), plain, ids, weights, act, wide)
        assert_close(got, want.to(BF16), 3)  # h is rounded to 8 bits


# a form's shapes: in each run one with warps of one program and one with a warp to a program, in the full matrix all
WARPS = [(4, 4), (1, 1), (8, 4)]
EMULATIONS = [
    pytest.param(shape, form, warps, marks=[] if (i - j) % 5 == 0 and (i + j + k) % 4 == 0 else pytest.mark.slow)
    for (i, shape), (j, form), (k, warps) in itertools.product(enumerate(SHAPES), enumerate(FORMS), enumerate(WARPS))
]


@pytest.mark.parametrize(
    ("shape", "form", "warps"), [*EMULATIONS, pytest.param(LONG, "mx", (1, 1), marks=pytest.mark.slow)], ids=str
)
def test_four_bits_emulated(shape, form, warps, emulated):
    compare_four(shape, form, warps, "cpu")


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_sixteen_bits_emulated(shape, held, emulated):
    compare_sixteen(shape, 8 if shape[0] == 2 else 4, 2, "cpu", held and shape[3] // 2)


EIGHT = [(torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.int8, False)]
SCALED_SHAPES = [(1, 192, 128, 4, 2), (2, 64, 448, 5, 3), (1, 576, 64, 9, 8)]


@pytest.mark.parametrize(("small", "by_block"), EIGHT)
@pytest.mark.parametrize("shape", SCALED_SHAPES, ids=str)
def test_eight_bits_emulated(shape, small, by_block, emulated):
    compare_scaled(shape, small, by_block, RowConfig(8, 4, 8 if shape[0] == 2 else 4, 1), "cpu")


# -------------------------------------------------------------------------------------------------------------- a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("small", "by_block"), EIGHT)
@pytest.mark.parametrize("config", [RowConfig(8, 4, 4, 2), RowConfig(8, 8, 8, 6), RowConfig(8, 4, 8, 12)])
@pytest.mark.parametrize("shape", [*SCALED_SHAPES, (1, *GPT_OSS), (2, *DEEPSEEK)], ids=str)
def test_eight_bits(shape, config, small, by_block, on_hopper):
    compare_scaled(shape, small, by_block, config, "cuda", pdl=shape[0] % 3)


REAL = [(1, *GPT_OSS), (1, *QWEN), (2, *DEEPSEEK), (4, *QWEN)]


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [(4, 4), (8, 8), (4, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [*SHAPES, LONG, *REAL], ids=str)
def test_four_bits(shape, form, warps, on_hopper):
    compare_four(shape, form, warps, "cuda", pdl=shape[0] % 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("warps", "ahead"), [(4, 2), (4, 8), (8, 5), (8, 16)])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[1:], *REAL], ids=str)
def test_sixteen_bits(shape, held, warps, ahead, dtype, on_hopper):
    compare_sixteen(shape, warps, ahead, "cuda", shape[3] // 2 if held else 0, dtype, pdl=shape[0] % 3)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["mx", None])
@pytest.mark.parametrize("rows", [1, 4])
def test_dependent_launches_and_graphs_change_nothing(rows, form, on_hopper):
    """The choice of experts is made in the chain, just before: `down` must not read an older one."""
    from quire.kernels.experts import experts, routing
    from quire.kernels.experts.routing_reference import Routing

    torch.manual_seed(rows)
    hidden, inner, num_experts, top_k = 2048, 768, 32, 8
    if form is None:
        w = Weights(
            *(torch.randn(size, device="cuda").to(BF16) / 32 for size in ((32, 2 * inner, hidden), (32, hidden, inner)))
        )
    else:
        w = FourBitWeights(*(four_bits_of(form, size, "cuda") for size in ((32, 2 * inner, hidden), (32, hidden, inner))))
    routers = [torch.randn(num_experts, hidden, device="cuda").to(BF16) / 16 for _ in range(6)]
    config = RowConfig(16, 4, 4, 6)
    start = torch.randn(rows, hidden, device="cuda").to(BF16)

    def chain(pdl):
        x = start
        for router in routers:
            ids, weights = routing.router(x, router, Routing(num_experts=num_experts, top_k=top_k), pdl=pdl)
            x = torch.nn.functional.normalize(experts.experts(x, w, ids, weights, SwiGLU(), config=config, pdl=pdl), dim=1) * 32
        return x

    check_dependent_launches(chain, early=rows == 1)
