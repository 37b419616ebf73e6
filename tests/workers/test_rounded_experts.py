"""Inputs that a checkpoint has quantized, where no Linear takes them: those of experts, and latents behind kv_b_proj."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from quantized_models import compressed, fp8_groups
from quantized_packers import fp8_rows, int8_rows
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from tiny_models import tiny_model
from workers.test_models import PROMPT, DenseAttention

from quire.workers.layers.experts import Experts
from quire.workers.loading.weights import load_weights
from quire.workers.models import mla
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

pytestmark = pytest.mark.usefixtures("dequantized")

CHANNEL, TOKEN = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"w1": 0.02, "w3": 0.035, "w2": 0.06}


def checkpoint(name, config, pack, folder):
    """`name` with the layers that `pack` returns tensors of."""
    shutil.copytree(tiny_model(name), folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    tensors = load_file(folder / "model.safetensors")
    for layer in [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]:
        if (found := pack(tensors[f"{layer}.weight"], layer)) is not None:
            del tensors[f"{layer}.weight"]
            tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_model_config(folder)
    model = build_model(config, torch.float32, Parallel())
    load_weights(model, folder, "cpu", progress=False)
    return config, model


def int8_tokens(x, kind):
    s = x.abs().amax(-1, keepdim=True) / 127
    return (x / s).round() * s


def fp8_static(x, kind):
    return (x / STATIC[kind]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * STATIC[kind]


def int8_but_of_down(x, kind):
    return x if kind == "w2" else int8_tokens(x, kind)


def static_inputs(w, layer):
    scale = torch.tensor(STATIC[layer.rpartition(".")[2]])
    return {**fp8_rows(w, layer)[0], "input_scale": scale}


@pytest.mark.parametrize(
    ("config", "pack", "rounded"),
    [
        (compressed("int-quantized", CHANNEL, TOKEN), lambda w, layer: int8_rows(w, layer)[0], int8_tokens),
        (
            compressed("float-quantized", {**CHANNEL, "type": "float"}, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            static_inputs,
            fp8_static,
        ),
        (
            {**compressed("int-quantized", CHANNEL, TOKEN), "ignore": ["re:.*w2$"]},
            lambda w, layer: None if layer.endswith("w2") else int8_rows(w, layer)[0],
            int8_but_of_down,
        ),
    ],
)
def test_experts_round_their_inputs_as_the_checkpoint_says(config, pack, rounded, tmp_path):
    _, model = checkpoint("mixtral", config, lambda w, n: pack(w, n) if ".experts." in n else None, tmp_path / "m")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(9, 64, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in h]).int()
    weights, want = torch.rand(9, 2, generator=generator), torch.zeros(9, 64)
    for t, j in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        gate, up = experts.gate_up[ids[t, j]].chunk(2)
        inner = F.silu(rounded(h[t], "w1") @ gate.t()) * (rounded(h[t], "w3") @ up.t())
        want[t] += rounded(inner, "w2") @ experts.down[ids[t, j]].t() * weights[t, j]
    with torch.inference_mode():
        got = experts(h, ids, weights)
        alone = experts(h[3:4], ids[3:4], weights[3:4])
    assert (got - want).norm() < 1e-3 * want.norm(), "a step of one input's rounding at most"
    torch.testing.assert_close(alone[0], got[3], rtol=1e-5, atol=1e-5)


def test_latents_are_what_kv_b_proj_would_see(tmp_path, monkeypatch):
    """Its inputs are rounded before the cache: nothing else reads them."""
    config = compressed("float-quantized", {**CHANNEL, "type": "float"}, {**TOKEN, "type": "float"})
    config["config_groups"]["group_0"]["targets"] = ["re:.*kv_b_proj$"]
    pack = lambda w, layer: fp8_rows(w, layer)[0] if layer.endswith("kv_b_proj") else None  # noqa: E731
    config, model = checkpoint("deepseek-v3", config, pack, tmp_path / "m")

    def logits():
        with torch.inference_mode():
            return model.compute_logits(
                model(PROMPT, context_of(DenseAttention(config.attention_specs(Parallel())), torch.arange(len(PROMPT))))
            )

    rounded = logits()
    monkeypatch.setattr(mla.KeysAndValues, "rounded", None)
    plain, norm = logits(), model.model.layers[0].self_attn.kv_a_layernorm
    assert (rounded - plain).abs().max() > 0.01
    latents = torch.randn(5, norm.weight.shape[0], generator=torch.Generator().manual_seed(0))
    monkeypatch.undo()
    torch.testing.assert_close(
        model.model.layers[0].self_attn.kv_b_proj.rounded(latents), fp8_groups(latents, "", 1 << 20), rtol=0, atol=0
    )
