"""Experts that stay quantized, as a GPU keeps them, loaded on a CPU: the numbers are those that are dequantized otherwise."""

import functools

import pytest
import torch
from quantized_models import GPU_FORMATS
from quantized_packers import STATIC, awq, fp8_blocks, fp8_rows, fp8_tensor, words
from tiny_models import tiny_model
from workers.test_experts import QUANTIZED, as_mxfp4, changed, experts_of

from quire.kernels.experts import four_bits_weight
from quire.kernels.experts.four_bits_weight import FourBitWeights
from quire.kernels.experts.scaled_weight import ScaledWeights
from quire.workers.layers import experts as experts_layer
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

pytestmark = pytest.mark.usefixtures("dequantized")


@pytest.fixture
def keep(monkeypatch):
    """Calls it to have models keep their experts quantized from then on."""
    return functools.partial(monkeypatch.setattr, experts_layer, "capability_of", lambda device: (9, 0))


def plain(weights):
    """gate|up and down of experts in whatever form."""
    if isinstance(weights, FourBitWeights):
        return [four_bits_weight.unpack(w) for w in weights[:2]]
    if isinstance(weights, ScaledWeights):
        return [w.dequantized() for w in weights[:2]]
    return list(weights[:2])


def assert_kept(folder, parallel, keep, kind=FourBitWeights, quantization=None):
    def load():
        model = build_model(read_model_config(folder, quantization=quantization), torch.float32, parallel)
        load_weights(model, folder, "cpu", progress=False)
        return model

    want = [plain(module.weights) for module in experts_of(load())]
    keep()
    model = load()
    assert experts_of(model)
    for module, dequantized in zip(experts_of(model), want, strict=True):
        assert isinstance(module.weights, kind)
        for one, two in zip(plain(module.weights), dequantized, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    return model


@pytest.mark.parametrize("size", [1, 2])
def test_mxfp4(size, tmp_path, keep):
    folder = changed("wide-gpt-oss", tmp_path / "mxfp4", as_mxfp4, quantization_config=QUANTIZED)
    model = assert_kept(folder, Parallel(size - 1, size), keep)
    names = [name.rpartition(".")[2] for name, _ in model.named_parameters() if "experts" in name]
    assert set(names) == {"gate_up_bias", "down_bias"} | {
        f"{kind}_{part}" for kind in ("gate_up", "down") for part in ("words", "scales", "factors")
    }


def each_expert(pack):
    """Every expert's layers packed on their own."""

    def change(tensors):
        found = dict(tensors)
        for key in tensors:
            if ".experts." in key:
                layer = key.removesuffix(".weight")
                parts, _ = pack(found.pop(key), layer)
                found |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        return found

    return change


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "modules_to_not_convert": ["self_attn", "mlp.gate"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
GPTQ["dynamic"] = {"-:.*self_attn": {}, "-:.*mlp.gate$": {}}


@pytest.mark.parametrize("size", [1, 2])
def test_four_bit_integers(size, tmp_path, keep):
    folder = changed("wide-qwen3-moe", tmp_path / "awq", each_expert(awq), quantization_config=AWQ)
    model = assert_kept(folder, Parallel(size - 1, size), keep)
    assert all(w.zeros is not None for module in experts_of(model) for w in module.weights[:2])


def symmetric_gptq(w, name):
    """All zero points are 8; scales that bfloat16 holds."""
    grouped = w.unflatten(1, (-1, 32))
    s = (grouped.abs().amax(2) / 7).bfloat16()
    q = (grouped / s[:, :, None].float()).round().clamp(-8, 7).flatten(1) + 8
    zeros = words(torch.full((w.shape[1] // 32, w.shape[0]), 7), 4)
    return {"qweight": words(q, 4).t(), "qzeros": zeros, "scales": s.t()}, None


def test_what_all_groups_share_is_not_kept(tmp_path, keep):
    folder = changed("wide-qwen3-moe", tmp_path / "gptq", each_expert(symmetric_gptq), quantization_config=GPTQ)
    assert_kept(folder, Parallel(), keep)
    model = build_model(read_model_config(folder), torch.bfloat16, Parallel())
    load_weights(model, folder, "cpu", progress=False)
    for weight in (w for module in experts_of(model) for w in module.weights[:2]):
        assert weight.zeros is None and weight.scales.dtype == torch.bfloat16


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [".*self_attn", ".*mlp.gate$"]}
FP8_ROWS = GPU_FORMATS["fp8-row"][0] | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("pack", "config", "blocks"),
    [(lambda w, name: fp8_blocks(w, 128, 128), FP8_BLOCKS, [2, 2]), (fp8_rows, FP8_ROWS, [1, 1])],
    ids=["blocks", "rows"],
)
def test_eight_bits(pack, config, blocks, size, tmp_path, keep):
    folder = changed("wide-qwen3-moe", tmp_path / "fp8", each_expert(pack), quantization_config=config)
    model = assert_kept(folder, Parallel(size - 1, size), keep, ScaledWeights)
    if size == 1:
        assert [w.scales.shape[1] for w in experts_of(model)[0].weights[:2]] == blocks


STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": [".*self_attn", ".*mlp.gate$"]}


def test_the_greatest_of_static_scales_of_inputs_is_kept(tmp_path, keep):
    """Gate's and up's are one, and those of all experts: one product has them all."""

    def pack(w, name):
        parts, values = fp8_tensor(w, name)
        parts["input_scale"] = parts["input_scale"] * (2 if ".experts.3." in name else 1)
        return parts, values

    folder = changed("wide-qwen3-moe", tmp_path / "fp8", each_expert(pack), quantization_config=STATIC_FP8)
    model = assert_kept(folder, Parallel(), keep, ScaledWeights)
    for module in experts_of(model):
        gate_up, down = module.weights[:2]
        want = 2 * max(STATIC["gate_proj"], STATIC["up_proj"]), 2 * STATIC["down_proj"]
        assert (gate_up.input_scale.item(), down.input_scale.item()) == pytest.approx(want)
    dummy_weights(model, 1)
    assert all(w.input_scale.item() > 0 for module in experts_of(model) for w in module.weights[:2])


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-latent"])
@pytest.mark.parametrize("asked", ["fp8", "fp8_per_channel", "int8", "int4"])
def test_experts_without_a_gate(asked, name, keep):
    model = assert_kept(tiny_model(name), Parallel(), keep, FourBitWeights if asked == "int4" else ScaledWeights, asked)
    [experts] = experts_of(model)
    assert experts.weights.gate_up.shape == (8, 48, 40 if name.endswith("latent") else 64)
    dummy_weights(model, 1)


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_channel", "fp8_per_block", "int8", "int4"])
def test_rounded_while_loading(asked, keep):
    kind = FourBitWeights if asked == "int4" else ScaledWeights
    model = assert_kept(tiny_model("wide-qwen3-moe"), Parallel(), keep, kind, asked)
    if kind is ScaledWeights:
        assert experts_of(model)[0].weights.down.by_block == (asked == "fp8_per_block")


def test_what_no_kernel_takes_is_dequantized_and_said(tmp_path, keep, caplog):
    config = read_model_config(tiny_model("wide-qwen3-moe"), {"quantization_config": AWQ | {"group_size": 128}})
    keep()
    build_model(config, torch.float32, Parallel(1, 4))
    assert "from model.layers.0.mlp.experts.0.gate_proj to model.layers.1.mlp.experts.7.down_proj" in caplog.text
    assert "inputs split among GPUs within groups of 128" in caplog.text


@pytest.mark.parametrize(
    ("name", "config"), [("wide-gpt-oss", QUANTIZED), ("wide-qwen3-moe", AWQ), ("wide-qwen3-moe", FP8_ROWS)]
)
def test_dummy_weights_are_as_wide_as_plain_ones(name, config, keep):
    keep()
    model = build_model(read_model_config(tiny_model(name), {"quantization_config": config}), torch.bfloat16, Parallel())
    dummy_weights(model, 1)
    for module in experts_of(model):
        for weight in plain(module.weights):
            assert 0.6 < weight.std() / model.config.initializer_range < 1.6 and weight.mean().abs() < weight.std() / 8
