"""RMSNorm: the CPU path against transformers, the kernel against the CPU path."""

import pytest
import torch

from quire.kernels.elementwise import norm_reference

SHAPES = [(1, 1), (1, 1024), (3, 67), (5, 128), (2, 4096), (7, 5120)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative: a rounding step or two of the dtype


def inputs(shape, dtype, device):
    g = torch.Generator().manual_seed(sum(shape))
    x, residual = (torch.randn(shape, generator=g).to(device, dtype) for _ in range(2))
    return x, residual, (torch.randn(shape[1], generator=g) + 1).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_path_is_transformers_norm_to_the_bit(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual, weight = inputs((5, 67), dtype, "cpu")
    module = LlamaRMSNorm(67, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    assert torch.equal(norm_reference.rms_norm(x, weight, 1e-5), module(x))
    total = x + residual
    assert torch.equal(norm_reference.add_rms_norm(x, residual, weight, 1e-5), module(total))
    assert torch.equal(residual, total)


def test_out_may_be_the_input_on_the_cpu():
    x, residual, weight = inputs((3, 16), torch.float32, "cpu")
    want = norm_reference.rms_norm(x, weight, 1e-6)
    assert norm_reference.rms_norm(x, weight, 1e-6, out=x) is x
    assert torch.equal(x, want)
    want = norm_reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(norm_reference.add_rms_norm(x, residual, weight, 1e-6, out=x), want)


def compare(shape, dtype, device):
    from quire.kernels.elementwise import norm

    x, residual, weight = inputs(shape, dtype, device)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6), **tolerance)
    wide = torch.empty(shape[0], 2 * shape[1], device=device, dtype=dtype)[:, : shape[1]]  # rows apart
    wide.copy_(x)
    ours, theirs = residual.clone(), residual.clone()
    want = norm_reference.add_rms_norm(x, theirs, weight, 1e-6)
    torch.testing.assert_close(norm.add_rms_norm(wide, ours, weight, 1e-6, out=wide), want, **tolerance)
    assert torch.equal(ours, theirs)


def parts_of_integers(device):
    """(parts as `scaled_hopper` writes them, the product that they are)"""
    g = torch.Generator().manual_seed(5)
    sums = torch.randint(-(2**22), 2**22, (3, 4, 200), generator=g, dtype=torch.int32)
    xs, ws = (torch.rand(n, generator=g) / 2**20 for n in (4, 200))
    behind = torch.full((2, 4, 200), 2**30, dtype=torch.int32)
    behind[0, 0], behind[1, 0, :4] = ws.view(torch.int32), xs.view(torch.int32)
    return torch.cat([sums, behind]).to(device), (sums.sum(0).float() * xs[:, None] * ws).to(device)


def compare_parts_of_integers(device, dtype):
    from quire.kernels.elementwise import norm
    from quire.kernels.linear import quantize

    (parts, y), residual = parts_of_integers(device), torch.randn(4, 200, device=device).to(dtype)
    weight, plain, ours = torch.ones(200, device=device, dtype=dtype), residual.clone(), residual.clone()
    want, got = norm.add_rms_norm(y.to(dtype), plain, weight, 1e-6), norm.add_rms_norm(parts, ours, weight, 1e-6)
    assert torch.equal(got, want) and torch.equal(ours, plain)
    plain, ours = residual.clone(), residual.clone()
    want = quantize.rms_norm_quantize(y.to(dtype), plain, weight, 1e-6, torch.int8)
    got = quantize.rms_norm_quantize(parts, ours, weight, 1e-6, torch.int8)
    assert torch.equal(got.data, want.data) and torch.equal(got.scales, want.scales) and torch.equal(ours, plain)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_of_integers_are_exact_in_parts(dtype):
    compare_parts_of_integers("cpu", dtype)


@pytest.mark.gpu
def test_gpu_sums_of_integers_are_exact_in_parts():
    compare_parts_of_integers("cuda", torch.bfloat16)


def compare_places(device):
    from quire.kernels.elementwise import norm

    x, residual, weight = inputs((3, 200), torch.float32, device)
    places = torch.randperm(200, device=device).to(torch.int32)
    for first in (None, x):
        plain, placed = (residual.clone() for _ in range(2))
        if first is None:
            want, got = norm.rms_norm(plain, weight, 1e-6), norm.rms_norm(placed, weight, 1e-6, places=places)
        else:
            want = norm.add_rms_norm(x, plain, weight, 1e-6)
            got = norm.add_rms_norm(x, placed, weight, 1e-6, places=places)
        assert torch.equal(got[:, places.long()], want) and torch.equal(placed, plain)


@pytest.mark.interpret
def test_columns_go_to_their_places_in_the_interpreter():
    compare_places("cpu")


@pytest.mark.gpu
def test_columns_go_to_their_places():
    compare_places("cuda")


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_in_the_interpreter(shape):
    compare(shape, torch.float32, "cpu")


KINDS = [("rms_norm", "rounded"), ("rms_norm", "wide"), ("rms_norm", "plus_one"), ("layer_norm", True), ("layer_norm", False)]


def compare_kind(function, how, shape, dtype, device):
    """Every norm, plain, of several heads with weights of their own, and of a scaled sum."""
    from quire.kernels.elementwise import norm

    x, residual, weight = inputs(shape, dtype, device)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    given = {"weighs": how} if function == "rms_norm" else {"bias": residual[0] if how else None}
    ours, theirs = getattr(norm, function), getattr(norm_reference, function)
    weights = (weight,) if function == "rms_norm" or how else (weight, None)
    for w in weights:
        torch.testing.assert_close(ours(x, w, 1e-6, **given), theirs(x, w, 1e-6, **given), **tolerance)
    total, want = residual.clone(), norm_reference.add(x, residual.clone(), 0.3)
    normed = getattr(norm, f"add_{function}")(x, total, weight, 1e-6, scale=0.3, **given)
    torch.testing.assert_close(total, want, **tolerance)
    torch.testing.assert_close(normed, theirs(total, weight, 1e-6, **given), **tolerance)
    if given.get("bias") is None:
        heads = torch.cat((x, 2 * x, residual), 1).unflatten(1, (3, -1))
        each = torch.stack((weight, weight + 1, weight - 1))
        out = torch.zeros(len(x), 4 * x.shape[1], device=device, dtype=dtype)[:, : 3 * x.shape[1]].unflatten(1, (3, -1))
        for w in (weight, each):
            torch.testing.assert_close(ours(heads, w, 1e-6, out, **given), theirs(heads, w, 1e-6, **given), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_norms_are_transformers_to_the_bit(dtype):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x, _residual, weight = inputs((5, 67), dtype, "cpu")
    for module, weighs in ((Gemma2RMSNorm(67, 1e-5), "plus_one"), (Olmo2RMSNorm(67, 1e-5), "wide")):
        module.to(dtype).weight.data.copy_(weight)
        assert torch.equal(norm_reference.rms_norm(x, weight, 1e-5, weighs=weighs), module(x))
    layer_norm = CohereLayerNorm(67, 1e-5).to(dtype)
    layer_norm.weight.data.copy_(weight)
    torch.testing.assert_close(norm_reference.layer_norm(x, weight, 1e-5), layer_norm(x))
    own = torch.nn.functional.layer_norm(x, (67,), weight, x[0], 1e-5)
    torch.testing.assert_close(norm_reference.layer_norm(x, weight, 1e-5, bias=x[0]), own)


@pytest.mark.interpret
@pytest.mark.parametrize("function,how", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 67), (2, 128)])
def test_kinds_in_the_interpreter(shape, function, how):
    compare_kind(function, how, shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function,how", KINDS)
def test_kinds(function, how, dtype):
    for shape in ((3, 67), (300, 2304)):
        compare_kind(function, how, shape, dtype, "cuda")


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.elementwise import norm

    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="shapes"):
        norm.rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(TypeError, match="dtypes"):
        norm.rms_norm(x, torch.zeros(8, dtype=torch.float16), 1e-6)
    with pytest.raises(ValueError, match="stride"):
        norm.rms_norm(torch.zeros(8, 2).t(), torch.zeros(8), 1e-6)
    assert norm.rms_norm(torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (300, 8192)])
def test_kernel(shape, dtype):
    compare(shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [1, 2])  # LATE, EARLY
def test_programmatic_dependent_launch_gives_the_same(mode):
    from quire.kernels.elementwise import norm

    x, residual, weight = inputs((16, 1024), torch.bfloat16, "cuda")
    ours, theirs = residual.clone(), residual.clone()
    y, want = x, x
    for _ in range(50):  # a chain, each link reading what the one before it wrote
        y = norm.add_rms_norm(y, ours, weight, 1e-6, pdl=mode)
        want = norm.add_rms_norm(want, theirs, weight, 1e-6)
    assert torch.equal(y, want)
    assert torch.equal(ours, theirs)
