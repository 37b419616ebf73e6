"""Quantized checkpoints of models with recurrent layers: convolution, a and b stay floats; experts may have no gate.

Ours with packed tensors is compared with ours with the values that they stand for, which test_hybrid_models.py compares with
transformers.
"""

import json
import re
import shutil

import pytest
import quantized_packers
import tiny_hybrids
import torch
from quantized_models import GPU_FORMATS, compressed
from quantized_packers import fp8_blocks, fp8_rows, integers, words
from safetensors.torch import load_file, save_file
from thread_ranks import on_every_rank
from tiny_models import tiny_model
from workers.test_hybrid_models import pass_of

from quire.workers.layers.experts import Experts
from quire.workers.layers.kept_experts import KeptExperts
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

G = 8
# as packers leave them out: what is no linear layer, too narrow, or a router
PLAIN = re.compile(r"embed|lm_head|conv1d|conv\.conv|in_proj_a|in_proj_b|\.b_proj|gate\.weight|expert_gate|router|visual")


def gptq(w, name):
    return quantized_packers.gptq(w, name, 4, G, 1, False)


def awq(w, name):
    n, k = w.shape
    g_idx = torch.arange(k) // G
    q, z, s = integers(w, 4, g_idx)
    columns = torch.tensor([8 * i + c for i in range(n // 8) for c in (0, 2, 4, 6, 1, 3, 5, 7)])
    tensors = {"qweight": words(q.t()[:, columns], 4), "qzeros": words(z.t()[:, columns], 4), "scales": s.t().half()}
    return tensors, (q - z[:, g_idx]) * s[:, g_idx]


def packed(w, name):
    g_idx = torch.arange(w.shape[1]) // G
    q, z, s = integers(w, 4, g_idx)
    tensors = {"weight_packed": words(q, 4), "weight_scale": s, "weight_zero_point": words(z.t(), 4).t()}
    return {**tensors, "weight_shape": torch.tensor(w.shape)}, (q - z[:, g_idx]) * s[:, g_idx]


def modelopt_blocks(w, name):
    """ModelOpt writes scales of blocks in four dimensions."""
    tensors, values = fp8_blocks(w, 128, 128)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"][:, None, :, None]}, values


GROUP = {"num_bits": 4, "strategy": "group", "group_size": G, "symmetric": False}
FORMS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": False, "sym": False}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": G, "version": "gemm", "zero_point": True}, awq),
    "compressed-tensors": (compressed("pack-quantized", GROUP), packed),
    "fp8-rows": (GPU_FORMATS["fp8-weight-only"][0], fp8_rows),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}, modelopt_blocks),
}


def folders(name, pack, config, tmp_path, beside=None):
    """A packed checkpoint, and one of the values. beside: a file of the quantization, in place of config.json's field."""
    source = tiny_model(name)
    fields, ours, plain = json.loads((source / "config.json").read_text()), {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        is_linear = layer != key and tensor.ndim == 2 and tensor.shape[0] % 8 == tensor.shape[1] % G == 0
        if not is_linear or PLAIN.search(key):
            ours[key] = plain[key] = tensor
            continue
        parts, plain[key] = pack(tensor, layer)
        ours |= {f"{layer}.{part}": value for part, value in parts.items()}
    assert any("conv" in key and key in ours for key in plain) and len(ours) > len(plain)
    made = []
    for kind, tensors in (("packed", ours), ("plain", plain)):
        folder = tmp_path / kind
        shutil.copytree(source, folder)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        if kind == "packed" and beside is None:
            (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
        elif kind == "packed":
            (folder / beside).write_text(json.dumps(config))
        made.append(folder)
    return made


@pytest.mark.usefixtures("dequantized")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", tiny_hybrids.FIRST)
def test_packed_weights_stand_for_their_values(name, form, tmp_path):
    config, pack = FORMS[form]
    found = [pass_of(read_model_config(folder), folder, Parallel()) for folder in folders(name, pack, config, tmp_path)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("dequantized")
@pytest.mark.parametrize("form", ["gptq", "compressed-tensors", "modelopt"])
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear"])
def test_packed_weights_are_split_over_ranks(name, form, tmp_path):
    config, pack = FORMS[form]
    ours, plain = folders(name, pack, config, tmp_path)
    parts, _ = on_every_rank(2, lambda parallel: pass_of(read_model_config(ours), ours, parallel))
    torch.testing.assert_close(parts[0], pass_of(read_model_config(plain), plain, Parallel()), rtol=1e-3, atol=1e-3)


SCALE = {"up_proj": 0.008, "down_proj": 0.05, "in_proj": 0.02, "out_proj": 0.015}


def modelopt_tensor(w, name):
    s = w.abs().amax() / 448
    q = (w / s).to(torch.float8_e4m3fn)
    scale = torch.tensor(SCALE.get(name.split(".")[-1], 0.012))
    return {"weight": q, "weight_scale": s, "input_scale": scale}, q.float() * s


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-latent", "qwen3.5"])
def test_modelopts_fp8_is_that_of_others(name, tmp_path):
    """The same tensors under another method's name: weights and inputs are rounded alike."""
    exported = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*conv1d*"]},
    }
    ours, plain = folders(name, modelopt_tensor, exported, tmp_path, beside="hf_quant_config.json")
    theirs = tmp_path / "theirs"
    shutil.copytree(ours, theirs)
    (theirs / "hf_quant_config.json").unlink()
    fields = json.loads((theirs / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    (theirs / "config.json").write_text(json.dumps({**fields, "quantization_config": fp8}))
    found = [pass_of(read_model_config(folder), folder, Parallel()) for folder in (ours, theirs, plain)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])  # inputs are rounded
    config = read_model_config(ours)
    assert (config.quantization.method, config.quantization.kv_cache_dtype) == ("modelopt", "fp8_e4m3")


@pytest.mark.usefixtures("dequantized")
@pytest.mark.parametrize("name", ["nemotron-h", "qwen3.5-moe"])
def test_modelopt_names_the_algorithm_of_each_layer(name, tmp_path):
    """By the checkpoint's names; layers that it does not name are plain."""
    layers = {}

    def pack(w, layer):
        if "out_proj" in layer:
            return {"weight": w}, w
        layers[layer] = {"quant_algo": "FP8_PB_WO"}
        return modelopt_blocks(w, layer)

    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    ours, plain = folders(name, pack, config, tmp_path)
    found = [pass_of(read_model_config(folder), folder, Parallel()) for folder in (ours, plain)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", [*FORMS, "modelopt-tensor"])
@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-latent"])
def test_a_cpu_keeps_experts_without_a_gate(name, form, tmp_path, request):
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
    config, pack = (FORMS | {"modelopt-tensor": (fp8, modelopt_tensor)})[form]
    ours, plain = folders(name, pack, config, tmp_path)

    def experts(folder):
        model = build_model(read_model_config(folder), torch.float32, Parallel())
        load_weights(model, folder, "cpu", progress=False)
        [found] = [module for module in model.modules() if isinstance(module, Experts)]
        return found

    kept, other = experts(ours), experts(plain)
    assert isinstance(kept._kept, KeptExperts) and other._kept is None
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, kept._sizes.hidden, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(5)]).int()
    weights = torch.rand(5, 3, generator=generator)
    with torch.inference_mode():
        got, want = kept(x, ids, weights), other(x, ids, weights)
    is_rough = form in ("gptq", "awq", "compressed-tensors", "modelopt-tensor")  # products in bfloat16; inputs that are rounded
    torch.testing.assert_close(got, want, rtol=0, atol=(0.05 if is_rough else 1e-5) * float(want.abs().max()))
    if form == "modelopt-tensor":
        request.getfixturevalue("dequantized")
        rounded = experts(ours)
        assert rounded._kept is None
        with torch.inference_mode():
            torch.testing.assert_close(rounded(x, ids, weights), got, rtol=1e-5, atol=1e-5)
