"""What users give as a model: addresses of the hub are taken, and what is something else gets a line that helps."""

import json

import pytest

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import model_summary, resolve_model
from quire.enginecore.loading.model_names import served_name
from quire.ipc.hub_names import hub_id_of


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/owner/Name-1.5B",
        "https://huggingface.co/owner/Name-1.5B/",
        "http://huggingface.co/owner/Name-1.5B/tree/main",
        "huggingface.co/owner/Name-1.5B?library=transformers",
        "https://hf.co/owner/Name-1.5B",
        "owner/Name-1.5B",
    ],
)
def test_an_address_of_the_hub_is_its_repository(name):
    assert hub_id_of(name) == served_name(name) == "owner/Name-1.5B"


@pytest.mark.parametrize(
    "name", ["gpt2", "/models/x", "./a:b", "owner/name:v2", "https://example.org/owner/name", "C:\\models"]
)
def test_other_names_stay_as_they_are(name):
    assert hub_id_of(name) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", r"names a GGUF file of unsloth/Qwen3-8B-GGUF \(Q4_K_M\), which is not read"),
        ("qwen3:IQ2_XXS", "names a GGUF file of qwen3"),
        ("owner/name:q8_0", "names a GGUF file"),
        ("https://huggingface.co/owner/name/blob/main/model.safetensors", "part of the repository owner/name: give owner/name"),
        ("https://huggingface.co/owner/name/tree/other", "--revision for a branch"),
    ],
)
def test_what_means_something_else_is_said(name, said):
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(name)


def folder_with(folder, **files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


LORA = {"base_model_name_or_path": "owner/base", "peft_type": "LORA"}
OTHERS = {
    "gguf": ({"model__gguf": b"GGUF\x03"}, "has GGUF files, which are not read"),
    "gguf-with-config": ({"model__gguf": b"GGUF\x03", "config__json": {}}, "has GGUF files, which are not read"),
    "lora": ({"adapter_config__json": LORA, "adapter_model__safetensors": b""}, "is a LoRA adapter of owner/base, not a model"),
    "lora-with-config": ({"adapter_config__json": LORA, "config__json": {}}, "is a LoRA adapter of owner/base"),
    "mistral": ({"params__json": {}, "tekken__json": {}, "consolidated__safetensors": b""}, "in Mistral's own format"),
    "diffusers": ({"model_index__json": {}}, "makes images"),
    "sentences": ({"modules__json": []}, "sentence-transformers"),
    "nothing": ({"README__md": b""}, "has no config.json: it is not a model in Hugging Face's format"),
    "pickled": ({"config__json": {}, "pytorch_model__bin": b""}, "has no model.safetensors"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_folder_of_something_else_is_named(kind, tmp_path):
    files, said = OTHERS[kind]
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(str(folder_with(tmp_path / kind, **files)))


def test_a_gguf_file_is_named(tmp_path):
    folder = folder_with(tmp_path / "m", model__gguf=b"GGUF\x03", other__txt=b"x")
    with pytest.raises(ModelFilesError, match="is a GGUF file, which is not read"):
        resolve_model(str(folder / "model.gguf"))
    with pytest.raises(ModelFilesError, match="is a file; give the model's folder"):
        resolve_model(str(folder / "other.txt"))


def test_a_model_of_images_is_named(tmp_path):
    fields = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "image_size": 224, "patch_size": 16}
    with pytest.raises(
        ModelFilesError, match="ViTForImageClassification is a model of images or sounds without a language model"
    ):
        model_summary(folder_with(tmp_path / "m", config__json=fields))
    with pytest.raises(ModelFilesError, match="vocab_size must be a positive integer"):
        model_summary(folder_with(tmp_path / "n", config__json={"architectures": ["LlamaForCausalLM"]}))
