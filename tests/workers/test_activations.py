"""Inputs rounded by formula: to the bit, each token for itself, and each of several layers side by side by its own scale."""

import pytest
import torch

from quire.workers.layers.formats.activations import rounded
from quire.workers.layers.linear import Linear, Placement
from quire.workers.loading.quantized.schemes import Activations, Quantization, Scaled
from quire.workers.parallel import Parallel
from quire.workers.shard import whole

FP8, INT8 = Activations(dtype="fp8"), Activations(dtype="int8")
ASYMMETRIC = Activations(dtype="int8", is_symmetric=False)
GROUPS = Activations(dtype="fp8", group_size=8)
ALL = [FP8, INT8, ASYMMETRIC, GROUPS]


@pytest.mark.parametrize("how", ALL)
def test_a_tokens_values_depend_on_no_other_token(how):
    x = torch.randn(5, 20) * torch.tensor([[1e-4], [1.0], [300.0], [0.0], [7.0]])
    together = rounded(x, how)
    assert all(torch.equal(together[i : i + 1], rounded(x[i : i + 1], how)) for i in range(5))
    assert together.isfinite().all() and not together[3].any()
    assert (together - x).abs().amax(1).le(x.abs().amax(1) / (14 if how.dtype == "fp8" else 120)).all()
    assert rounded(x.bfloat16(), how).dtype == torch.bfloat16


def test_values_of_the_formulas():
    x = torch.tensor([[-254.0, 1.0, 3.0, 127.0]])  # of int8 the scale is 2; ties go to even
    assert rounded(x, INT8).tolist() == [[-254.0, 0.0, 4.0, 128.0]]
    x = torch.tensor(
        [[-448.0, 17.0, 19.0, 0.001]]
    )  # of e4m3 it is 1: 16, 18 and 20 are there, and 2^-9, of which 0.001 is half
    assert rounded(x, FP8).tolist() == [[-448.0, 16.0, 20.0, 2.0**-9]]
    assert rounded(torch.tensor([[0.0, 255.0, 100.4]]), ASYMMETRIC).tolist() == [[0.0, 255.0, 100.0]]


def test_a_static_scale_saturates():
    fp8, int8 = Activations(dtype="fp8", is_static=True), Activations(dtype="int8", is_static=True)
    x, half = torch.tensor([[1e6, -1e6, 3.0]]), 0.5
    assert rounded(x, fp8, half).tolist() == [[224.0, -224.0, 3.0]]
    assert rounded(x, int8, half).tolist() == [[63.5, -64.0, 3.0]]
    assert rounded(x, int8, half, -28.0).tolist() == [[77.5, -50.0, 3.0]]


def test_layers_side_by_side_keep_what_they_are():
    """Of q, k and v one is not quantized and two have scales of their own."""
    static = Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8", is_static=True))
    schemes = {"q_proj": static, "k_proj": None, "v_proj": static}
    place = Placement(torch.float32, Parallel(), Quantization("fp8", schemes.__getitem__))
    layer = Linear(whole(16), {"q_proj": whole(8), "k_proj": whole(4), "v_proj": whole(4)}, True, place)
    values, weights, inputs = {}, {}, {"q_proj": 0.01, "k_proj": None, "v_proj": 0.3}
    for name, size in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
        q, s = torch.randn(size, 16).to(torch.float8_e4m3fn), torch.rand(size, 1)
        weights[name] = (q.float() * s) if schemes[name] else torch.randn(size, 16)
        values[f"{name}.bias"] = torch.randn(size)
        values[f"{name}.weight"] = q if schemes[name] else weights[name]
        values |= {f"{name}.weight_scale": s, f"{name}.input_scale": torch.tensor(inputs[name])} if schemes[name] else {}
    loaders = {name: loader for one in layer.format.formats for name, loader in one.loaders("qkv_proj.format")}
    others = {f"{name}.activation_scale" for name in ("q_proj", "v_proj")}  # transformers' name, where the other is missing
    assert loaders.keys() == values.keys() | others
    loaders = {name: loader for name, loader in loaders.items() if name not in others}
    for name, loader in loaders.items():
        assert loader.fits(tuple(values[name].shape))
        loader.write(values[name], 0)
    for then in {loader.then for loader in loaders.values()} - {None}:
        then()
    for one in layer.format.formats:
        one.finish()
    x = torch.randn(3, 16)
    expected = []
    for name, s in inputs.items():
        h = x if s is None else (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
        expected.append(torch.nn.functional.linear(h, weights[name], values[f"{name}.bias"]))
    torch.testing.assert_close(layer(x), torch.cat(expected, 1))
    torch.testing.assert_close(layer.split_k(x[:1]), torch.cat(expected, 1)[:1])
