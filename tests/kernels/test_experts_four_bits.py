"""Experts with weights of 4 bits: what is packed unpacked, and the kernels against the CPU path on the dequantized weights."""

import pytest
import torch
from experts_cases import CLAMPED, GPT_OSS, QWEN, TOLERANCE, check_dependent_launches, made, mx

from quire.kernels.experts import experts_reference
from quire.kernels.experts.experts_reference import Relu2, SwiGLU, Weights, is_gated
from quire.kernels.experts.four_bits_weight import (
    FourBitWeights,
    in_bytes,
    new_int,
    new_mx,
    put_int,
    put_mx,
    unpack,
)
from quire.kernels.linear import int4_weight

EVERY = slice(None)
# rows, hidden, intermediate, experts, top k: multiples of 32
SHAPES = [(1, 32, 32, 1, 1), (3, 160, 96, 5, 2), (7, 64, 288, 4, 4), (40, 96, 160, 6, 3)]
FORMS = ["mx", 32, 64, 128, 0]


@pytest.mark.parametrize("k", [32, 96, 128, 416])
def test_codes_are_packed_exactly(k):
    g = torch.Generator().manual_seed(k)
    codes, exponents, values = mx((2, 5, k), g, 0, 255)  # beyond what 8 bits of a scale hold, too
    weight = new_mx(2, 5, k, "cpu")
    for expert in range(2):  # in pieces
        for rows in (slice(0, 2), slice(2, 5)):
            put_mx(weight, slice(expert, expert + 1), rows, in_bytes(codes)[expert, rows][None], exponents[expert, rows][None])
    assert torch.equal(unpack(weight, torch.float64), values)
    with pytest.raises(ValueError, match="NaN"):
        put_mx(weight, EVERY, EVERY, in_bytes(codes), exponents.masked_fill(exponents == exponents.max(), 255))


@pytest.mark.parametrize("k", [64, 192, 416])
@pytest.mark.parametrize("group", [32, 64, 0])
def test_integers_are_packed_as_those_of_linear_layers(group, k):
    g = torch.Generator().manual_seed(k)
    weight, values = made(group, (3, 6, k), g)
    assert torch.equal(unpack(weight).double(), values)
    assert (weight.zeros is None) == (group == 64) and weight.scales.dtype == torch.bfloat16
    q = torch.randint(16, (1, 6, k), generator=g, dtype=torch.uint8)
    zeros, scales = (torch.randint(16, (1, 6, -(-k // (group or k))), generator=g) for _ in range(2))
    weight = new_int(3, 6, k, group, torch.float32, "cpu")
    put_int(weight, slice(1, 2), EVERY, q, zeros, scales)
    packed = int4_weight.pack(q[0], zeros[0], scales[0], group)
    for ours, theirs in zip(weight[:3], packed[:3], strict=True):
        assert torch.equal(ours[1], theirs)
    assert weight.group == packed.group


def operands(shape, form, dtype=torch.float32, device="cpu", has_bias=False, skewed=False, parts=2):
    rows, hidden, inner, num_experts, top_k = shape
    g = torch.Generator().manual_seed(sum(shape))
    gate_up, gate_up_values = made(form, (num_experts, parts * inner, hidden), g, device)
    down, down_values = made(form, (num_experts, hidden, inner), g, device)
    x = torch.randn(rows, hidden + 8, generator=g).to(device, dtype)[:, :hidden]  # rows apart
    biases = [(torch.randn(num_experts, n, generator=g) / 2).to(device, dtype) for n in (parts * inner, hidden)]
    biases = biases if has_bias else [None, None]
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)])
    if skewed:
        ids = torch.arange(top_k).expand(rows, -1)
    w = FourBitWeights(gate_up, down, *biases)
    plain = Weights(gate_up_values.to(device, dtype), down_values.to(device, dtype), *biases)
    shared = torch.randn(rows, hidden, generator=g).to(device, dtype)
    return x, w, plain, ids.int().contiguous().to(device), torch.rand(rows, top_k, generator=g).to(device), shared


def compare(shape, form, dtype, device, config=None, act=None, **options):
    from quire.kernels.experts import experts

    act = act or (CLAMPED if shape[0] % 2 else SwiGLU())
    options |= {} if is_gated(act) else {"parts": 1}
    x, w, plain, ids, weights, shared = operands(shape, form, dtype, device, **options)
    for add in (None, shared):
        got = experts.experts(x, w, ids, weights, act, add, config=config)
        want = experts_reference.experts(x, plain, ids, weights, act, add)
        assert got.dtype == dtype
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


def configs():
    from quire.kernels.experts.four_bits import EXACT
    from quire.kernels.experts.four_bits_pairs import PAIRS, Pairs
    from quire.kernels.experts.four_bits_tiles import Tiles

    wide = Pairs(16, 32, 0, 0)  # few programs, which take the interpreter long
    return {"pairs": PAIRS, "wide pairs": wide, "chosen": None, "exact": EXACT, "tiles": Tiles(32, 16, 32, 4, 2)}


CASES = [(shape, form) for i, shape in enumerate(SHAPES) for form in (FORMS if i < 2 else ("mx", FORMS[1 + i]))]


@pytest.mark.interpret
@pytest.mark.parametrize(("shape", "form"), CASES)
def test_tiles_in_the_interpreter(shape, form):
    compare(shape, form, torch.float32, "cpu", configs()["tiles" if shape[0] == 40 else "chosen"], has_bias=shape[0] % 2 == 1)


@pytest.mark.interpret
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SHAPES[0], (2, 160, 32, 3, 2), (1, 416, 32, 2, 1)])
def test_pairs_in_the_interpreter(shape, form):
    compare(shape, form, torch.float32, "cpu", configs()["wide pairs"], has_bias=shape[0] % 2 == 1)


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["mx", 32, 64])
@pytest.mark.parametrize("name", ["wide pairs", "tiles"])
def test_experts_without_a_gate_in_the_interpreter(name, form):
    rows, inner = (1, 64) if name == "wide pairs" else (3, 96)
    compare((rows, 160, inner, 3, 2), form, torch.float32, "cpu", configs()[name], Relu2(), has_bias=form == 32)


@pytest.mark.interpret
def test_a_row_in_a_batch_equals_the_row_alone_in_the_interpreter():
    assert_rows_are_independent("cpu", (5, 96, 32, 3, 2))


def assert_rows_are_independent(device, shape):
    from quire.kernels.experts import experts

    x, w, _, ids, weights, _ = operands(shape, "mx", torch.float32, device)
    batch = experts.experts(x, w, ids, weights, SwiGLU())
    for t in range(len(x)):
        one = slice(t, t + 1)
        assert torch.equal(experts.experts(x[one], w, ids[one], weights[one], SwiGLU())[0], batch[t])


# -------------------------------------------------------------------------------------------------------------- a GPU
REAL = [(1, *GPT_OSS), (2, *GPT_OSS), (33, *GPT_OSS), (5, *QWEN), (64, *QWEN), (300, *QWEN)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["mx", 32, 128])
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_experts_of_four_bits(shape, form, dtype):
    compare(shape, form, dtype, "cuda", has_bias=shape[0] % 2 == 1, skewed=shape[0] == 300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["mx", 32, 128])
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 300, 1000])
def test_experts_without_a_gate(rows, form, dtype):
    """Nemotron 3 Nano's sizes; mxfp4's few rows, and its many with bfloat16, have kernels of their own."""
    compare((rows, 2688, 1856, 16, 6), form, dtype, "cuda", act=Relu2())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pairs", "exact", "tiles"])
@pytest.mark.parametrize("form", FORMS)
def test_every_way(form, name):
    compare((7, 416, 288, 4, 3), form, torch.bfloat16, "cuda", configs()[name], has_bias=True)


@pytest.mark.gpu
def test_a_row_in_a_batch_equals_the_row_alone():
    assert_rows_are_independent("cuda", (50, 256, 96, 16, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_dependent_launches_and_graphs_change_nothing(rows):
    from quire.kernels.experts import experts

    x, w, _, ids, weights, shared = operands((rows, *GPT_OSS), "mx", torch.bfloat16, "cuda")

    def chain(pdl):
        y = x
        for _ in range(6):
            y = experts.experts(y / 8, w, ids, weights, SwiGLU(), shared, pdl=pdl)
        return y

    check_dependent_launches(chain, early=rows == 1)
