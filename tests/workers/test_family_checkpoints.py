"""What checkpoints hold besides a model's tensors and is passed over: layers that predict further tokens, keys and values of
layers that read others', towers of images. And latent attention's weights in blocks of fp8.
"""

import json
import shutil

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from workers.test_experts import fp8
from workers.test_models import PROMPT, DenseAttention

from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import load_weights
from quire.workers.models import mla
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel


def logits(folder):
    config = read_model_config(folder)
    model = build_model(config, torch.float32, Parallel())
    load_weights(model, folder, "cpu", progress=False)
    with torch.inference_mode():
        attention = DenseAttention(config.attention_specs(Parallel()))
        return model.compute_logits(model(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))


def with_more(name, folder, tensors, **fields):
    """A copy of a tiny model with these tensors and fields."""
    shutil.copytree(tiny_models.tiny_model(name), folder)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", pytest.param("mistral4", marks=pytest.mark.slow)])
def test_the_layer_behind_the_last_is_passed_over(name, tmp_path):
    more = ("eh_proj.weight", "enorm.weight", "shared_head.norm.weight", "self_attn.o_proj.weight", "embed_tokens.weight")
    layers = read_model_config(tiny_models.tiny_model(name)).layers
    tensors = {f"model.layers.{len(layers)}.{part}": torch.ones(3) for part in more}
    folder = with_more(name, tmp_path / "mtp", tensors, num_nextn_predict_layers=1)
    assert torch.equal(logits(folder), logits(tiny_models.tiny_model(name)))
    with pytest.raises(WeightsError, match=f"surplus: model.layers.{len(layers)}"):
        logits(with_more(name, tmp_path / "none", tensors, num_nextn_predict_layers=0))


@pytest.mark.parametrize(("name", "prefix"), [("gemma4", "model."), ("gemma4-images", "model.language_model.")])
def test_keys_and_values_that_no_layer_makes_are_passed_over(name, prefix, tmp_path):
    last = len(read_model_config(tiny_models.tiny_model(name)).layers) - 1
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    folder = with_more(name, tmp_path / "m", {f"{prefix}layers.{last}.self_attn.{part}": torch.ones(3) for part in parts})
    assert torch.equal(logits(folder), logits(tiny_models.tiny_model(name)))
    with pytest.raises(WeightsError, match=r"surplus: model\.layers\.0\.self_attn\.x_proj"):
        logits(with_more(name, tmp_path / "n", {f"{prefix}layers.0.self_attn.x_proj.weight": torch.ones(3)}))


@pytest.mark.parametrize("name", ["gemma3-images", "gemma4-images", "llama4-images", "mistral4-images", "ministral3-images"])
def test_towers_are_passed_over(name):
    with_towers = load_file(tiny_models.tiny_model(name) / "model.safetensors")
    assert any("vision" in tensor for tensor in with_towers)
    assert torch.isfinite(logits(tiny_models.tiny_model(name))).all()


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gemma3"])
def test_a_decoder_may_have_been_saved_by_itself(name, tmp_path):
    folder = with_more(name, tmp_path / "m", {})
    tensors = load_file(folder / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(tiny_models.tiny_model(name)))


def multimodal(name, folder, holds_head, outer, text):
    """A tiny model with these flags in its two configs, and with a head that is the embedding, a row on, or without one."""
    fields = json.loads((tiny_models.tiny_model(name) / "config.json").read_bytes())
    flags = {"tie_word_embeddings": outer, "text_config": fields["text_config"] | {"tie_word_embeddings": text}}
    with_more(name, folder, {}, **flags)
    tensors = {key: x for key, x in load_file(folder / "model.safetensors").items() if "lm_head" not in key}
    if holds_head:
        [embedding] = (x for key, x in tensors.items() if key.endswith("model.embed_tokens.weight"))
        tensors["language_model.lm_head.weight"] = embedding.roll(1, 0)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "outer", "text"),
    [
        ("gemma3-images", True, False),
        ("gemma3-images", False, True),
        ("ministral3-images", True, False),
        ("ministral3-images", None, False),
        ("ministral3-images", None, None),
    ],
)
def test_what_a_checkpoint_holds_says_whether_a_multimodal_model_is_tied(name, outer, text, tmp_path):
    """transformers writes the outer flag, by default true, and text_config's own, which it does not heed."""
    untied, tied = (logits(multimodal(name, tmp_path / str(holds), holds, outer, text)) for holds in (True, False))
    torch.testing.assert_close(untied, tied.roll(1, 1))


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral4"])
def test_latent_attention_in_blocks_of_fp8_is_dequantized(name, tmp_path, monkeypatch):
    """What transformers calls kv_b_proj is no Linear here. How its inputs are rounded: test_rounded_experts.py."""
    monkeypatch.setattr(mla.KeysAndValues, "rounded", None)
    tensors = load_file(tiny_models.tiny_model(name) / "model.safetensors")
    some = {key: w for key, w in tensors.items() if "kv_b_proj" in key}
    assert len(some) == 3
    renamed = {key.replace("self_attn", "experts"): w for key, w in some.items()}  # `fp8` takes experts' alone
    found = []
    for is_plain in (False, True):
        made = {key.replace(".experts.", ".self_attn."): w for key, w in fp8(renamed, plain=is_plain).items()}
        others = {
            f"model.layers.{i}.{part}"
            for i in range(3)
            for part in ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp")
        }
        config = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": sorted(others)}
        fields = {} if is_plain else {"quantization_config": config}
        found.append(logits(with_more(name, tmp_path / str(is_plain), made, **fields)))
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], logits(tiny_models.tiny_model(name)))
