"""`quire estimate` of quantized weights: against the bytes of files and of workers."""

import json
import shutil

import pytest
from estimate_cases import read
from quantized_models import quantized
from tiny_models import tiny_model

from quire.frontend.cli.estimate import GPUS, estimate, text_of
from quire.frontend.cli.estimate_weights import PLAIN, bits_on_gpu
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import GIB

pytestmark = pytest.mark.usefixtures("asked_here")  # test_estimate_families.py asks a process of its own


def test_weights_on_a_gpu_take_what_they_are_quantized_to(asked_here):
    model, memory = read(tiny_model("llama")), 8 * GIB
    of = {name: estimate(model, EngineConfig(quantization=name), memory).weights_bytes for name in (None, "fp8", "int4")}
    kept = 2 * model.sizes.vocab_size * model.sizes.hidden_size
    assert of[None] == 4 * model.num_parameters  # float32, as config.json has it
    assert of["fp8"] == 4 * kept + model.num_parameters - kept
    assert of["int4"] == 4 * kept + (model.num_parameters - kept) * 67 // 128
    assert "quantized" in text_of(
        estimate(model, EngineConfig(quantization="fp8"), memory), model, EngineConfig(quantization="fp8")
    )
    assert (
        estimate(model, EngineConfig(quantization="fp8"), 0).weights_bytes
        < estimate(model, EngineConfig(), 0).weights_bytes / 2
    )


def test_a_quantized_checkpoint_counts_what_it_stands_for(tmp_path):
    quantized("llama", "gptq", tmp_path / "model")
    model = read(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert 0.95 * file.stat().st_size < model.stored_bytes < file.stat().st_size
    assert estimate(model, EngineConfig(), 8 * GIB).weights_bytes == model.stored_bytes
    assert (model.num_parameters, model.is_counted) == (read(tiny_model("llama")).num_parameters, False)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}, "input_activations": None}
INT8 = {"num_bits": 8, "symmetric": True}


def compressed(**changes):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP | changes}}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, PLAIN),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, PLAIN),
        ({"load_in_4bit": True}, PLAIN),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None),
        ({"quant_method": "mxfp4"}, 9),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 96]}, PLAIN),
        (compressed(), None),
        (compressed(weights={"num_bits": 4, "group_size": 48}), PLAIN),
        (compressed(input_activations=INT8), PLAIN),
        (compressed(weights=INT8, input_activations=INT8), None),
        (compressed(weights=INT8, input_activations=INT8 | {"symmetric": False}), PLAIN),
        (compressed(weights={"num_bits": 8, "type": "float", "block_structure": [128, 64]}), None),
        (compressed(weights={"num_bits": 8, "block_structure": [128, 64]}, input_activations=INT8), PLAIN),
        (compressed() | {"format": "mxfp4-pack-quantized"}, 9),
        ({}, None),
    ],
    ids=str,
)
def test_what_no_kernel_computes_takes_a_plain_weights_bytes(config, bits):
    assert bits_on_gpu(config, has_fp8=True) == bits


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma2"])
def test_head_and_embedding_of_a_quantized_checkpoint_take_the_dtypes_bytes(name, tmp_path):
    """The files' are float32."""
    quantized(name, "w8a8", tmp_path / "model")
    model = read(tmp_path / "model")
    of = {dtype: estimate(model, EngineConfig(dtype=dtype), 8 * GIB).weights_bytes for dtype in ("float32", "bfloat16")}
    kept = (1 if model.is_tied else 2) * model.sizes.vocab_size * model.sizes.hidden_size
    assert of == {"float32": model.stored_bytes, "bfloat16": model.stored_bytes - 2 * kept}


def test_a_quantized_head_takes_its_files_bytes(tmp_path):
    quantized("llama", "gptq-head", tmp_path / "model")
    model = read(tmp_path / "model")
    weights = estimate(model, EngineConfig(dtype="bfloat16"), 8 * GIB).weights_bytes
    embedding, hidden = model.sizes.vocab_size * model.sizes.hidden_size, model.sizes.hidden_size
    floats = embedding + hidden * (7 + 3 * 128)  # norms, and three layers' up_proj, which rules leave out
    assert weights == model.stored_bytes - 2 * floats


@pytest.mark.parametrize("form", ["nf4", "mxfp4", "pack-quantized", "awq"])
def test_a_quantized_checkpoint_takes_what_the_worker_holds_of_it(form, tmp_path):
    quantized("llama", form, tmp_path / "model")
    model = read(tmp_path / "model")
    kept, found = 2 * model.sizes.vocab_size * model.sizes.hidden_size, estimate(model, EngineConfig(), 8 * GIB)
    wanted = {
        "nf4": 4 * model.num_parameters,
        "pack-quantized": 4 * model.num_parameters,  # groups of 16
        "mxfp4": 4 * kept + (model.num_parameters - kept) * 9 // 8,
        "awq": model.stored_bytes,
    }
    assert found.weights_bytes == wanted[form]


def test_gpus_without_fp8_hold_plain_weights(tmp_path):
    model = read(tiny_model("llama"))
    of = {gpu: estimate(model, EngineConfig(quantization="fp8"), 8 * GIB, gpu).weights_bytes for gpu in GPUS}
    plain = {gpu for gpu, size in of.items() if size == 4 * model.num_parameters}
    assert plain == {"A100", "A100-40GB", "A10", "A10G", "A6000", "RTX-3090"}
    quantized("llama", "fp8-row", tmp_path / "model")
    model = read(tmp_path / "model")
    assert estimate(model, EngineConfig(), 8 * GIB, "nvidia a100-80gb").weights_bytes == 4 * model.num_parameters
    assert estimate(model, EngineConfig(), 8 * GIB, "L4").weights_bytes == model.stored_bytes


def test_modelopts_own_file_says_how_a_folder_is_quantized(tmp_path):
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    model = read(tmp_path / "model")
    assert model.quantization == {"quant_method": "modelopt", **said} and model.has_kv_cache_scheme
    assert bits_on_gpu(model.quantization, has_fp8=True) is None and bits_on_gpu(model.quantization, has_fp8=False) == PLAIN
