"""Which file of a folder has its weights."""

import pytest

from quire.ipc.weights_file import weights_file


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["model.safetensors", "gptq_model-4bit-128g.safetensors"], "model.safetensors"),
        (["gptq_model-4bit-128g.safetensors"], "gptq_model-4bit-128g.safetensors"),
        (["gptq_model-4bit-128g.safetensors", "consolidated.safetensors", "adapter_model.safetensors"],
         "gptq_model-4bit-128g.safetensors"),
        (["gptq_model-4bit-128g.safetensors", "gptq_model-8bit.safetensors"], None),
        (["model-00001-of-00002.safetensors"], None),
        (["adapter_model.safetensors"], None),
        (["pytorch_model.bin"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_only_file_of_weights_is_taken(names, chosen, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    found = weights_file(tmp_path)
    assert (found and found.name) == chosen
