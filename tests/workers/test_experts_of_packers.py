"""Experts as packers write them today: under their own names, one by one where a family stacks them, their scales in one."""

import re

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from workers.test_experts import assert_same_experts, changed, fp8, model_of

from quire.workers.parallel import Parallel

pytestmark = pytest.mark.usefixtures("dequantized")


@pytest.mark.parametrize("name", ["mixtral", "minimax-m2"])
def test_llm_compressor_has_its_own_names_for_experts_layers(name, tmp_path):
    own, names = tiny_models.tiny_model(name), {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}

    def renamed(tensors):
        return {re.sub(r"\.w[123]\.", lambda found: names[found[0]], key): tensor for key, tensor in tensors.items()}

    folder = changed(name, tmp_path / "renamed", renamed)
    assert load_file(folder / "model.safetensors").keys() != load_file(own / "model.safetensors").keys()
    assert_same_experts(model_of(folder), model_of(own))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama4", "gpt-oss"])
def test_experts_one_by_one_of_a_family_that_stacks_them(name, size, tmp_path):
    """As packers write Llama 4 and gpt-oss, biases too; the last layer's stay floats, one by one."""

    def halves(tensor):
        return (tensor[0::2], tensor[1::2]) if name == "gpt-oss" else tensor.chunk(2)

    def apart(tensors, *, plain=False):
        found = dict(tensors)
        for key in tensors:
            if ".experts." not in key:
                continue
            values, q = tensors[key], None
            if not key.endswith("_bias") and ".layers.2." not in key:
                scale = values.abs().amax(1, keepdim=True) / 127
                q = (values / scale).round()
                found[key] = values = q * scale
            if plain:
                continue
            del found[key]
            prefix, part = key.rpartition(".")[0], "bias" if key.endswith("_bias") else "weight"
            for expert in range(len(values)):
                tensors_of = {part: values[expert].t()} if q is None else {
                    "weight": q[expert].t().to(torch.int8), "weight_scale": scale[expert].t()
                }  # fmt: skip
                for what, tensor in tensors_of.items():
                    each = halves(tensor) if "gate_up" in key else (tensor,)
                    kinds = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
                    found |= {f"{prefix}.{expert}.{kind}.{what}": t.contiguous() for kind, t in zip(kinds, each, strict=True)}
        return found

    group = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 8, "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": group}}
    packed = changed(name, tmp_path / "packed", apart, quantization_config=config)
    plain = changed(name, tmp_path / "plain", lambda tensors: apart(tensors, plain=True))
    for rank in range(size):
        assert_same_experts(model_of(packed, Parallel(rank, size)), model_of(plain, Parallel(rank, size)))


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(1, 2), Parallel(1, 2, expert_parallel=True)])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_scales_of_all_experts_in_one_tensor_are_those_of_each(name, parallel, tmp_path):
    """As transformers saves fp8: it takes weights apart again, and no scales."""
    kinds = {"gate_up": ("w1", "w3"), "down": ("w2",)} if name == "mixtral" else {"gate_up": ("gate", "up"), "down": ("down",)}
    end = "" if name == "mixtral" else "_proj"

    def packed(tensors):
        found = fp8(tensors)
        for prefix in {key.rpartition(".experts.")[0] for key in tensors if ".experts." in key}:
            for kind, layers in kinds.items():
                of_each = [
                    torch.cat([found.pop(f"{prefix}.experts.{i}.{layer}{end}.weight_scale_inv") for layer in layers])
                    for i in range(8)
                ]
                found[f"{prefix}.experts.{kind}_proj_scale_inv"] = torch.stack(of_each)
        return found

    left_out = [f"model.layers.{i}.self_attn" for i in range(4)]
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": left_out}
    ours = changed(name, tmp_path / "packed", packed, quantization_config=config)
    plain = changed(name, tmp_path / "plain", lambda tensors: fp8(tensors, plain=True))
    assert_same_experts(model_of(ours, parallel), model_of(plain, parallel))
