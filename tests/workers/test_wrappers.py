"""The text of multimodal checkpoints: greedy output equals transformers', under every name that checkpoints use."""

import json
import re
import shutil

import pytest
import tiny_models
import tiny_wrappers
import torch
from inline_engine import InlineEngine
from quantized_models import compressed
from quantized_packers import packed
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from workers.test_models import PROMPT as IDS
from workers.test_models import DenseAttention
from workers.test_parallel import on_every_rank

from quire.ipc.sampling import SamplingParams
from quire.ipc.text_config import text_fields
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import FAMILIES, parse_model_config, read_model_config
from quire.workers.models.wrappers import WRAPPERS
from quire.workers.parallel import Parallel

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]


def greedy(folder):
    return InlineEngine(folder).generate([PROMPT], GREEDY)[0]


def copied(name, folder):
    shutil.copytree(tiny_wrappers.wrapped(name), folder)
    return folder


@pytest.mark.parametrize("name", tiny_wrappers.MODELS)
def test_the_text_of_a_wrapper_equals_transformers(name):
    folder = tiny_wrappers.wrapped(name)
    others = [key for key in load_file(folder / "model.safetensors") if "visual" in key or "vision" in key]
    assert others or name == "gemma4-unified"
    with torch.inference_mode():
        want = (
            tiny_wrappers.reference(name)
            .generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[
                0, len(PROMPT) :
            ]
            .tolist()
        )
    assert greedy(folder) == want and len(set(want)) > 6
    config, core = read_model_config(folder), text_fields(json.loads((folder / "config.json").read_bytes()))
    assert (core["vocab_size"], core["max_position_embeddings"]) == (config.vocab_size, config.max_position_embeddings)
    assert config.architecture in FAMILIES


def old_names(key):
    """As transformers before 4.52 names them."""
    key = re.sub(r"^model\.language_model\.", "language_model.model.", key)
    return re.sub(
        r"^lm_head\.", "language_model.lm_head.", re.sub(r"^model\.(visual|vision_tower|multi_modal_projector)", r"\1", key)
    )


def new_names(key):
    """As transformers 4.52 to 4.57 names them."""
    key = re.sub(r"^language_model\.model\.", "model.language_model.", key)
    return re.sub(r"^language_model\.lm_head\.", "lm_head.", re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", key))


def bare_names(key):
    """As NVIDIA's Kimi K2.5 has them."""
    return key.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize(
    ("name", "name_of"),
    [
        ("qwen3-vl", old_names),
        ("glm4.1v", old_names),
        ("internvl", new_names),
        ("pixtral", new_names),
        ("kimi-k2.5", bare_names),
    ],
)
def test_names_of_other_versions_are_the_same_model(name, name_of, tmp_path):
    folder = copied(name, tmp_path / "m")
    before = set(load_file(folder / "model.safetensors"))
    tiny_wrappers.renamed(folder, name_of)
    assert set(load_file(folder / "model.safetensors")) != before
    assert torch.equal(logits(folder), logits(tiny_wrappers.wrapped(name)))


def logits(folder, parallel=None):
    config, parallel = read_model_config(folder), parallel or Parallel()
    model = build_model(config, torch.float32, parallel)
    load_weights(model, folder, "cpu", progress=False)
    with torch.inference_mode():
        attention = DenseAttention(config.attention_specs(parallel))
        return model.compute_all_logits(model(IDS, context_of(attention, torch.arange(len(IDS)))))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "glm4.1v", "glm4.5v"])
def test_a_config_without_text_config_is_the_same_model(name, tmp_path):
    """As Qwen2.5-VL and the first GLM-4.1V are published: the text's fields stand beside the others."""
    folder = copied(name, tmp_path / "m")
    text = json.loads((folder / "config.json").read_bytes())["text_config"]
    rope = {"type" if key == "rope_type" else key: value for key, value in text.pop("rope_parameters").items()}
    rope["type"] = "mrope"
    flat = {key: value for key, value in text.items() if key not in ("model_type", "tie_word_embeddings")}
    flat |= {"rope_scaling": rope, "rope_theta": rope.pop("rope_theta")}
    if (part := rope.pop("partial_rotary_factor", None)) is not None:
        flat["partial_rotary_factor"] = part
    tiny_wrappers.edit(folder, text_config=..., **flat)
    assert read_model_config(folder) == read_model_config(tiny_wrappers.wrapped(name))
    with pytest.raises(ModelConfigError, match="num_dreams"):
        parse_model_config({**json.loads((folder / "config.json").read_bytes()), "num_dreams": 3})


@pytest.mark.parametrize("name", ["internvl", "internvl-moe"])
def test_internvls_own_form_is_the_same_model(name, tmp_path):
    """InternVLChatModel, with llm_config, and an MLP of its own between the towers."""
    folder = copied(name, tmp_path / "m")
    config = json.loads((folder / "config.json").read_bytes())
    of_its_own = {
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "force_image_size": 448,
        "use_thumbnail": True,
        "model_type": "internvl_chat",
        "dynamic_image_size": True,
    }
    tiny_wrappers.edit(
        folder, architectures=["InternVLChatModel"], llm_config=config["text_config"], text_config=..., **of_its_own
    )
    tiny_wrappers.renamed(
        folder, lambda key: key.replace("vision_tower.", "vision_model.").replace("multi_modal_projector.", "mlp1.")
    )
    assert torch.equal(logits(folder), logits(tiny_wrappers.wrapped(name)))
    core = text_fields(json.loads((folder / "config.json").read_bytes()))
    assert (core["vocab_size"], core["max_position_embeddings"]) == (tiny_models.VOCAB_SIZE, tiny_models.MAX_POSITIONS)


def test_experts_of_qwen3_vl_lie_either_way(tmp_path):
    """[E, in, out] as published, [E, out, in] as transformers 5 saves them."""
    folder = copied("qwen3-vl-moe", tmp_path / "m")
    file = folder / "model.safetensors"
    turned = {
        key: tensor.transpose(1, 2).contiguous() if ".experts." in key else tensor for key, tensor in load_file(file).items()
    }
    save_file(turned, file)
    assert torch.equal(logits(folder), logits(tiny_wrappers.wrapped("qwen3-vl-moe")))


def test_a_layer_behind_the_last_is_passed_over_within_a_wrapper(tmp_path):
    folder = copied("glm4.5v", tmp_path / "m")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.language_model.layers.2.eh_proj.weight": torch.ones(3)}, file)
    assert torch.equal(logits(folder), logits(tiny_wrappers.wrapped("glm4.5v")))


def test_llava_1_5_leaves_sizes_to_llama():
    text = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    }
    fields = {"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 32000, "text_config": text}
    config = parse_model_config(fields)
    assert (len(config.layers), config.hidden_size, config.vocab_size, config.dtype) == (32, 4096, 32064, "float16")
    assert text_fields({**fields, "text_config": {"model_type": "llama"}})["vocab_size"] == 32000


def test_fields_around_the_text_do_not_change_it():
    text = {**{key: value for key, value in tiny_models.BASE.items() if value is not None}, "model_type": "qwen3_vl_text"}
    fields = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    plain = parse_model_config(fields)
    assert parse_model_config({**fields, "num_dreams": 3, "vision_config": {}, "hidden_size": 9}) == plain
    assert parse_model_config({**fields, "dtype": "bfloat16"}).dtype == "bfloat16"
    with pytest.raises(ModelConfigError, match="num_dreams"):
        parse_model_config({**fields, "text_config": {**text, "num_dreams": 3}})


def test_an_unknown_text_is_refused_by_its_name():
    fields = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "dreams"}}
    with pytest.raises(ModelConfigError, match=r"text_config of model_type 'dreams' is not supported; supported are llama, "):
        parse_model_config(fields, model_impl="quire")
    with pytest.raises(ModelConfigError, match="lacks text_config"):
        parse_model_config({"architectures": ["LlavaForConditionalGeneration"]}, model_impl="quire")


def test_every_row_has_a_family():
    assert {wrapper.text for wrapper in WRAPPERS.values()} <= FAMILIES.keys()


INT4 = {
    **compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    # as Kimi K2.5 lists them
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*shared_mlp.*",
        r"re:.*mlp\.(gate|up|down)_proj.*",
        "re:.*lm_head.*",
    ],
}


ALWAYS = (("kimi-k2.5", 2), ("glm4-moe-lite", 1), ("hy-v3", 2), ("mimo-v2", 2))
OTHERS = (("kimi-k2.5", 1), ("glm4.5v", 1), ("internvl-moe", 2), ("glm4-moe-lite", 2), ("hy-v3", 1), ("mimo-v2", 1))


@pytest.mark.usefixtures("dequantized")
@pytest.mark.parametrize(("name", "ranks"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_experts_may_be_quantized_under_the_names_of_checkpoints(name, ranks, tmp_path):
    """4-bit integers, each expert by itself; the same values as floats give the same logits, on each of the ranks."""
    is_wrapped = name in tiny_wrappers.MODELS
    source = tiny_wrappers.wrapped(name) if is_wrapped else tiny_models.tiny_model(name)
    values, quantized = load_file(source / "model.safetensors"), {}
    for key in list(values):
        layer, _, kind = key.rpartition(".")
        if ".experts." not in key or kind != "weight":
            quantized[key] = values[key]
            continue
        tensors, values[key] = packed(values[key], layer)
        quantized |= {f"{layer}.{tensor}": x for tensor, x in tensors.items()}
    assert len(quantized) > len(values) + 24
    found = []
    for tensors, is_quantized in ((values, False), (quantized, True)):
        folder = tmp_path / str(is_quantized)
        shutil.copytree(source, folder)
        save_file({key: x.contiguous() for key, x in tensors.items()}, folder / "model.safetensors")
        if is_quantized and is_wrapped:
            text = json.loads((folder / "config.json").read_bytes())["text_config"]
            tiny_wrappers.edit(folder, text_config={**text, "quantization_config": INT4})
        elif is_quantized:
            tiny_wrappers.edit(folder, quantization_config=INT4)
        found += on_every_rank(ranks, lambda parallel, folder=folder: logits(folder, parallel))[0]
    plain, *others = found
    for other in others:
        torch.testing.assert_close(other, plain, atol=2e-4 * max(1.0, float(plain.abs().max()) / 8), rtol=1e-4)
