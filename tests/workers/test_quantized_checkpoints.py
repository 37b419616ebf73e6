"""Quantized checkpoints: what is taken of them and what is refused, and how it is said."""

import json
import shutil

import pytest
import torch
from msgspec.structs import replace
from quantized_models import quantized
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from quire.enginecore.loading.model_files import resolve_model
from quire.workers.loading.quantized.schemes import Quantization
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel


# ------------------------------------------------------------------------------------------------------------- refusals
def folder_of(tmp_path, form="gptq", **changes):
    quantized("llama", form, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"].update(changes)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def change(folder, drop=(), **add):
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    save_file({**tensors, **{name.replace("__", "."): tensor for name, tensor in add.items()}}, folder / "model.safetensors")


def load(folder):
    model = build_model(read_model_config(folder), torch.float16, Parallel())
    load_weights(model, folder, "cpu")
    return model


def test_tensors_that_a_format_lacks_are_named(tmp_path):
    folder = folder_of(tmp_path, "fp8-block")
    change(folder, drop=["model.layers.0.mlp.down_proj.weight_scale_inv"])
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"):
        load(folder)


def test_a_group_size_that_the_checkpoint_does_not_have_is_seen_by_shapes(tmp_path):
    with pytest.raises(WeightsError, match=r"misshapen: .*qzeros is \[2, 8\], expected \[4, 8\]"):
        load(folder_of(tmp_path, group_size=16))


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("gptq", {"bits": 8}, "gptq, 8 bits, group_size 32, desc_act True"),
        ("gptq", {"modules_in_block_to_quantize": []}, "gptq, not quantized"),
        ("awq", {"group_size": 64}, "awq, 4 bits, group_size 64"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bitsandbytes, fp4, not double quantized"),
        ("fp8-block", {"weight_block_size": [64, 24]}, "fp8, fp8, a scale for 64 outputs by 24 inputs"),
    ],
)
def test_what_the_config_says_of_a_layer_that_does_not_fit_is_said(form, changes, said, tmp_path):
    layer = "model.layers.0.self_attn.q_proj"
    with pytest.raises(WeightsError) as error:
        load(folder_of(tmp_path, form, **changes))
    assert f"(quantization_config says of {layer}: {said}). Tensors m" in str(error.value) and "\n" not in str(error.value)


def test_a_quantized_checkpoint_without_its_config_is_told(tmp_path):
    folder = folder_of(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        WeightsError, match=r"\(it has no quantization_config, and model\.layers\.0\.self_attn\.q_proj is quantized"
    ):
        load(folder)


@pytest.mark.parametrize("form", ["gptq", None])
def test_of_a_layer_that_is_not_quantized_nothing_is_said(form, tmp_path):
    folder = folder_of(tmp_path, form) if form else shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change(folder, drop=["model.norm.weight"])
    with pytest.raises(WeightsError, match=r"config\.json describes\. Tensors missing: model\.norm\.weight$"):
        load(folder)


def test_values_that_contradict_each_other_name_the_layer(tmp_path):
    folder = folder_of(tmp_path)
    change(folder, model__layers__0__mlp__down_proj__g_idx=torch.full((128,), 3, dtype=torch.int32))
    with pytest.raises(WeightsError, match="down_proj cannot be dequantized: g_idx"):
        load(folder)


@pytest.mark.parametrize(
    ("form", "tensor", "value", "said"),
    [
        ("pack-quantized-order", "weight_shape", [64, 64], r"weight_shape says \[64, 64\], expected \[64, 128\]"),
        ("fp8-tensor", "input_scale", 0.0, "input_scale of 0: a positive number"),
        ("fp8-tensor", "input_scale", float("nan"), "input_scale of nan: a positive number"),
        ("gptq", "qweight", [[1] * 64] * 16, r"qweight is I64, expected I32"),
        ("gptq", "scales", [[1.0] * 63 + [float("nan")]] * 4, "scales has values that are infinite or no numbers"),
        ("fp8-tensor", "weight_scale", float("inf"), "weight_scale has values that are infinite or no numbers"),
    ],
)
def test_tensors_that_say_what_cannot_be_name_the_layer(form, tensor, value, said, tmp_path):
    folder = folder_of(tmp_path, form)
    change(folder, **{f"model__layers__0__mlp__down_proj__{tensor}": torch.tensor(value)})
    with pytest.raises(WeightsError, match=f"down_proj.*{said}"):
        load(folder)


@pytest.mark.parametrize("octets", [b'{"quant_type": "nf4"', b"\xff", b"[" * 100_000])
def test_a_quant_state_that_is_no_json_is_named(octets, tmp_path):
    folder = folder_of(tmp_path, "nf4")
    layer = "model.layers.0.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{layer}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(octets), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{layer} cannot be dequantized: quant_state is no JSON"):
        load(folder)


def test_layers_of_floats_are_taken_as_they_are(tmp_path):
    """Packers leave out what they do not list: here a projection, and all experts in one tensor."""
    folder = folder_of(tmp_path)
    name, plain = "model.layers.1.mlp.up_proj", load_file(tiny_model("llama") / "model.safetensors")
    parts = [f"{name}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
    change(folder, drop=parts, **{f"{name}.weight": plain[f"{name}.weight"]})
    weight = load(folder).model.layers[1].mlp.gate_up_proj.format.weight
    assert torch.equal(weight[128:], plain[f"{name}.weight"].half())


@pytest.mark.parametrize("family", ["llama4", "gemma4-moe", "gpt-oss", "qwen3-moe", "qwen2-moe"])
def test_experts_of_floats_beside_quantized_layers(family, tmp_path):
    """And routers, which are linear layers to some packers, quantized or not."""
    quantized(family, "nf4", tmp_path / "model")
    model, plain = load(tmp_path / "model"), load(tiny_model(family))
    values = dict(plain.named_parameters())
    experts = {n: p for n, p in model.named_parameters() if n.endswith(("experts.gate_up", "experts.down"))}
    assert experts and all(torch.equal(parameter, values[name]) for name, parameter in experts.items())


def test_quantize_config_json_stands_in_for_the_field(tmp_path):
    folder = folder_of(tmp_path, "gptq")
    fields = json.loads((folder / "config.json").read_text())
    config = fields.pop("quantization_config")
    del config["quant_method"]
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "quantize_config.json").write_text(json.dumps(config))
    assert read_model_config(folder).quantization.method == "gptq"
    load(folder)
    (folder / "quantize_config.json").write_text(json.dumps({**config, "bits": 3}))
    with pytest.raises(ModelConfigError, match=r"^quantize_config\.json: quantization_config: bits is 3: supported"):
        read_model_config(folder)


def test_autoawqs_first_file_stands_in_for_the_field(tmp_path):
    folder = folder_of(tmp_path, "awq")
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(config))
    assert read_model_config(folder).quantization.method == "awq"
    load(folder)


def test_a_file_of_weights_may_have_another_name(tmp_path):
    """As AutoGPTQ wrote it, beside its quantize_config.json."""
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    assert resolve_model(str(folder)) == folder.resolve()
    load(folder)


def test_a_multimodal_models_text_may_have_it(tmp_path):
    fields = json.loads((tiny_model("gemma3-images") / "config.json").read_text())
    fields["text_config"]["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_model_config(tmp_path).quantization.method == "bitsandbytes"


def test_compression_config_is_its_old_name(tmp_path):
    folder = folder_of(tmp_path, "w8a8")
    fields = json.loads((folder / "config.json").read_text())
    fields["compression_config"] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_model_config(folder).quantization.method == "compressed-tensors"


@pytest.mark.parametrize(
    ("form", "asked", "said"),
    [
        ("gptq", "fp8", "--quantization fp8: the checkpoint is quantized already, its quantization_config says gptq: leave"),
        ("fp8-tensor", "fp8_per_tensor", "says fp8: leave the flag out"),
        (None, "awq", "--quantization awq: the checkpoint has no quantization_config; its weights can be quantized while"),
    ],
)
def test_a_quantization_that_the_checkpoint_is_not_of(form, asked, said, tmp_path):
    folder = tiny_model("llama") if form is None else folder_of(tmp_path, form)
    with pytest.raises(ModelConfigError, match=said) as error:
        read_model_config(folder, quantization=asked)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("form", "method"), [("gptq", "gptq"), ("fp8-tensor", "fp8"), ("w8a8", "compressed-tensors")])
def test_the_checkpoints_own_method_may_be_named(form, method, tmp_path):
    assert read_model_config(folder_of(tmp_path, form), quantization=method).quantization.method == method


def test_names_in_the_model_are_the_checkpoints(tmp_path):
    """A layer is asked for by the name that its tensors have."""
    asked = []
    config = read_model_config(tiny_model("llama"))
    build_model(replace(config, quantization=Quantization("gptq", asked.append)), torch.float32, Parallel())
    tensors = load_file(tiny_model("llama") / "model.safetensors")
    linear = {name.removesuffix(".weight") for name in tensors if "_proj" in name or name == "lm_head.weight"}
    assert set(asked) == linear and len(asked) == len(linear)


def test_a_bias_of_zeros_is_taken_and_another_refused(tmp_path):
    """AutoGPTQ wrote one for each layer, whether the model had it or not."""
    folder = folder_of(tmp_path)
    change(folder, model__layers__0__mlp__down_proj__bias=torch.zeros(64))
    load(folder)
    change(folder, model__layers__0__mlp__down_proj__bias=torch.ones(64))
    with pytest.raises(WeightsError, match="down_proj has a bias"):
        load(folder)


def test_scales_of_keys_and_values_are_passed_over(tmp_path):
    folder = folder_of(tmp_path)
    change(folder, model__layers__0__self_attn__k_scale=torch.tensor(0.5))
    load(folder)


def test_scales_of_weights_that_stayed_floats_are_passed_over(tmp_path):
    """As transformers writes fp8 where a weight is no whole number of blocks."""
    folder = folder_of(tmp_path, "fp8-block")
    name, plain = "model.layers.1.mlp.up_proj.weight", load_file(tiny_model("llama") / "model.safetensors")
    change(folder, **{name: plain[name]})
    assert f"{name}_scale_inv" in load_file(folder / "model.safetensors")
    assert torch.equal(load(folder).model.layers[1].mlp.gate_up_proj.format.weight[128:], plain[name].half())


def test_a_layer_that_a_format_cannot_hold_is_named_before_a_byte_is_read(tmp_path):
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    config = {**fields, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 48, "version": "gemm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match=r"model\.layers\.0\.self_attn\.q_proj has 64 inputs, group_size is 48"):
        build_model(read_model_config(tmp_path), torch.float32, Parallel())


def test_the_size_that_would_fit_is_said(tmp_path):
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "intermediate_size": 40, "quantization_config": config}))
    with pytest.raises(ModelConfigError, match=r"mlp\.down_proj has 40 inputs, .* here of 8$"):
        build_model(read_model_config(tmp_path), torch.float32, Parallel())


def test_layers_in_order_may_lack_their_order(tmp_path):
    """As compressed-tensors saves those that llm-compressor has not ordered, whatever actorder says."""
    quantized("llama", "pack-quantized", folder := tmp_path / "model")
    want = dict(load(folder).named_parameters())
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(fields))
    assert all(torch.equal(parameter, want[name]) for name, parameter in load(folder).named_parameters())


def test_a_quantized_head_is_not_tied(tmp_path):
    fields = json.loads((tiny_model("llama-tied") / "config.json").read_text())
    config = {**fields, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match="tie_word_embeddings to false"):
        build_model(read_model_config(tmp_path), torch.float32, Parallel())
