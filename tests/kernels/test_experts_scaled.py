"""Experts with weights and inputs of 8 bits: the kernels against plain torch on what the 8 bits stand for."""

import pytest
import torch
import torch.nn.functional as F
from experts_cases import CLAMPED, DEEPSEEK, QWEN

from quire.kernels.experts.experts_reference import Relu2, SwiGLU, activate, is_gated
from quire.kernels.experts.scaled_weight import BLOCK, ScaledExperts, ScaledWeights

# rows, hidden, intermediate, experts, top k
SHAPES = [(1, 16, 16, 1, 1), (3, 160, 96, 5, 2), (7, 48, 272, 4, 4), (24, 128, 32, 3, 2)]
SMALL = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FORMS = [("fp8", False), ("fp8", True), ("int8", False)]
# a sum that differs in the last bit may bring h to the other side of a step of 8 bits
TOLERANCE = {torch.float32: 4e-3, torch.bfloat16: 3e-2, torch.float16: 2e-2}


def weight(shape, small, by_block, generator, device):
    experts, n, k = shape
    scales = (0.5 + torch.rand(experts, -(-k // BLOCK) if by_block else 1, n, generator=generator)) / (128 * k**0.5)
    data = torch.randn(shape, generator=generator) * 128
    data = data.clamp(-448, 448).to(small) if small.is_floating_point else data.clamp(-127, 127).round().to(small)
    return ScaledExperts(data.to(device), scales.to(device), by_block)


def operands(shape, kind, by_block, dtype, device, *, has_bias, skewed=False, parts=2):
    rows, hidden, inner, num_experts, top_k = shape
    g = torch.Generator().manual_seed(sum(shape))
    gate_up = weight((num_experts, parts * inner, hidden), SMALL[kind], by_block, g, device)
    down = weight((num_experts, hidden, inner), SMALL[kind], by_block, g, device)
    biases = [(torch.randn(num_experts, n, generator=g) / 2).to(device, dtype) for n in (parts * inner, hidden)]
    x = torch.randn(rows, hidden + 8, generator=g).to(device, dtype)[:, :hidden]  # rows apart
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)])
    if skewed:
        ids = torch.arange(top_k).expand(rows, -1)
    shared = torch.randn(rows, hidden, generator=g).to(device, dtype)
    w = ScaledWeights(gate_up, down, *(biases if has_bias else (None, None)))
    return x, w, ids.int().contiguous().to(device), torch.rand(rows, top_k, generator=g).to(device), shared


def rounded(x, small, by_block, static_scale=None):
    """x [T, K] in 8 bits and back, by formula."""
    if static_scale is not None:
        q = (x.double() / static_scale.double()).clamp(-448, 448)
        q = q.float().to(small).double() if small.is_floating_point else q.clamp(-127, 127).round()
        return (q * static_scale).float()
    size = BLOCK if by_block else x.shape[1]
    groups = F.pad(x.double(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    scale = groups.abs().amax(2, keepdim=True) / (448 if small.is_floating_point else 127)
    q = groups / scale.masked_fill(scale == 0, 1)
    q = q.float().to(small).double() if small.is_floating_point else q.round()
    return (q * scale).flatten(1)[:, : x.shape[1]].to(x.dtype if x.dtype == torch.float32 else torch.float32)


def reference(x, w, ids, weights, act, shared):
    small, by_block, dtype = w.gate_up.data.dtype, w.gate_up.by_block, x.dtype
    gate_up, down = w.gate_up.dequantized(), w.down.dequantized()
    x8, out = rounded(x, small, by_block, w.gate_up.input_scale), torch.zeros_like(x, dtype=torch.float32)
    if shared is not None:
        out += shared
    for t in range(len(x)):
        for e, weight_of in zip(ids[t].tolist(), weights[t], strict=True):
            h = gate_up[e] @ x8[t] + (0 if w.gate_up_bias is None else w.gate_up_bias[e].float())
            h8 = rounded(activate(h.to(dtype)[None], act), small, by_block, w.down.input_scale)[0]
            y = down[e] @ h8 + (0 if w.down_bias is None else w.down_bias[e].float())
            out[t] += weight_of * y
    return out.to(dtype)


def compare(shape, form, dtype, device, config=None, skewed=False, act=None, is_static=False):
    from quire.kernels.experts import experts

    has_bias = shape[0] % 2 == 1
    act = act or (CLAMPED if has_bias else SwiGLU())
    parts = 2 if is_gated(act) else 1
    x, w, ids, weights, shared = operands(shape, *form, dtype, device, has_bias=has_bias, skewed=skewed, parts=parts)
    if is_static:  # some inputs lie beyond the range
        scales = torch.tensor([[0.005], [0.02]], device=device)
        w = w._replace(gate_up=w.gate_up._replace(input_scale=scales[0]), down=w.down._replace(input_scale=scales[1]))
    for add in (None, shared):
        got = experts.experts(x, w, ids, weights, act, add, config=config)
        want = reference(x, w, ids, weights, act, add)
        assert got.dtype == dtype
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


def configs():
    from quire.kernels.experts.scaled import EXACT, PAIRS
    from quire.kernels.experts.scaled_tiles import Tiles

    return {"pairs": PAIRS, "exact": EXACT, "tiles": Tiles(32, 16, 32, 4, 2), "wide": Tiles(128, 64, 128, 8, 3)}


@pytest.fixture
def exact_casts(monkeypatch):
    """Triton's interpreter casts to e4m3 with errors (test_quantize)."""
    from quire.kernels.linear import quantize

    by_formula = quantize.quantize_reference
    monkeypatch.setattr(quantize, "quantize", lambda x, dtype, *, pdl, **how: by_formula(x, dtype, **how))


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize(("shape", "form"), [(s, f) for s in SHAPES[:2] for f in FORMS] + [(SHAPES[2], FORMS[1])])
def test_tiles_in_the_interpreter(shape, form):
    compare(shape, form, torch.float32, "cpu")


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_casts")
def test_larger_tiles_in_the_interpreter():
    compare(SHAPES[3], FORMS[1], torch.float32, "cpu", configs()["tiles"], skewed=True)


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SHAPES[0], (2, 160, 32, 3, 2)])
def test_pairs_in_the_interpreter(shape, form):
    compare(shape, form, torch.float32, "cpu", configs()["pairs"])


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pairs", "exact"])
def test_without_a_gate_in_the_interpreter(name, form):
    """Relu², and a bias with the odd number of rows."""
    compare((3, 160, 48, 3, 2), form, torch.float32, "cpu", configs()[name], act=Relu2())
    compare((2, 32, 160, 3, 2), form, torch.float32, "cpu", configs()[name], act=Relu2())


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("act", [None, Relu2()])
@pytest.mark.parametrize("form", [("fp8", False), ("int8", False)])
def test_static_scales_of_inputs_in_the_interpreter(form, act):
    for name in ("pairs", "exact"):
        compare((2, 96, 48, 3, 2), form, torch.float32, "cpu", configs()[name], act=act, is_static=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", [("fp8", False), ("int8", False)])
@pytest.mark.parametrize("rows", [1, 2, 16, 70, 300])
def test_without_a_gate(rows, form, dtype, is_static):
    """The sizes of Nemotron 3 Nano."""
    compare((rows, 2688, 1856, 16, 6), form, dtype, "cuda", act=Relu2(), is_static=is_static)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [*SHAPES, (1, *QWEN), (5, *QWEN), (64, *QWEN), (70, *DEEPSEEK)])
def test_experts_of_eight_bits(shape, form, dtype):
    compare(shape, form, dtype, "cuda", skewed=shape[0] == 24)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pairs", "exact", "tiles", "wide"])
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form, name):
    compare((7, 416, 272, 4, 3), form, torch.bfloat16, "cuda", configs()[name])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_row_in_a_batch_equals_the_row_alone(form):
    from quire.kernels.experts import experts

    x, w, ids, weights, _ = operands((50, 256, 128, 16, 4), *form, torch.float32, "cuda", has_bias=False)
    batch = experts.experts(x, w, ids, weights, SwiGLU())
    for t in range(len(x)):
        one = slice(t, t + 1)
        assert torch.equal(experts.experts(x[one], w, ids[one], weights[one], SwiGLU())[0], batch[t])
