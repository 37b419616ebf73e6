"""Architectures that are not served are refused as what they are, by their names or by config.json's fields."""

import pytest

from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import FAMILIES, parse_model_config
from quire.workers.models.refusals import BOTH, ENCODERS, RECURRENT, SPARSE
from quire.workers.models.wrappers import WRAPPED

SPARSE_TOO = (
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "Qwen4ExpForCausalLM",
)


@pytest.mark.parametrize("impl", ["auto", "quire", "transformers"])
@pytest.mark.parametrize("name", SPARSE_TOO)
def test_sparse_attention_is_said_to_be_sparse(name, impl):
    with pytest.raises(ModelConfigError, match=rf"^architecture {name} is not supported: its attention is sparse") as error:
        parse_model_config({"architectures": [name]}, model_impl=impl)
    assert ("recurrent" in str(error.value)) == name.startswith("Qwen4")


@pytest.mark.parametrize(
    "name", ["Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Lfm2ForCausalLM", "ZayaForCausalLM"]
)
def test_recurrent_models_are_said_to_be_recurrent(name):
    with pytest.raises(ModelConfigError, match=f"architecture {name} is not supported: it has recurrent layers, which are not"):
        parse_model_config({"architectures": [name]})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index_topk": 2048}, "its attention is sparse"),
        ({"text_config": {"index_topk": 2048}}, "its attention is sparse"),
        ({"sparse_attention_config": {"sparse_attention_freq": [0, 1]}}, "its attention is sparse"),
        ({"layer_types": ["full_attention", "compressed_sparse_attention"]}, "its attention is sparse"),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, "it has recurrent layers"),
        ({"layer_types": ["mamba", "attention"]}, "it has recurrent layers"),
    ],
)
def test_a_new_name_is_refused_by_its_fields(fields, said):
    with pytest.raises(ModelConfigError, match=f"architecture NewForCausalLM is not supported: {said}"):
        parse_model_config({"architectures": ["NewForCausalLM"], **fields})


@pytest.mark.parametrize("name", ["CLIPModel", "ViTForImageClassification", "SiglipVisionModel", "Wav2Vec2ForCTC"])
def test_models_that_write_no_text_are_named(name):
    with pytest.raises(ModelConfigError, match=f"architecture {name} is not supported: it generates no text"):
        parse_model_config({"architectures": [name], "vocab_size": 32})


def test_what_is_refused_is_not_served():
    refused = RECURRENT | SPARSE | BOTH | ENCODERS
    assert not refused & (FAMILIES.keys() | WRAPPED) and not RECURRENT & SPARSE and not BOTH & (RECURRENT | SPARSE)
