"""Architectures that are not served are refused as what they are, by their names or by config.json's fields."""

import json
from pathlib import Path

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
    "MiniMaxM3VLForCausalLM",
    "Qwen4ExpForCausalLM",
)


@pytest.mark.parametrize("impl", ["auto", "quire", "transformers"])
@pytest.mark.parametrize("name", SPARSE_TOO)
def test_sparse_attention_is_said_to_be_sparse(name, impl):
    with pytest.raises(ModelConfigError, match=rf"^architecture {name} is not supported: its attention is sparse") as error:
        parse_model_config({"architectures": [name]}, model_impl=impl)
    assert ("recurrent" in str(error.value)) == name.startswith("Qwen4")


RECURRENT_KINDS = {
    "MambaForCausalLM": "Mamba 1",
    "JambaForCausalLM": "Mamba 1",
    "ZambaForCausalLM": "Mamba 1",
    "Zamba2ForCausalLM": "Mamba 2 with attention that layers share",
    "RwkvForCausalLM": "RWKV",
    "RWKV7ForCausalLM": "RWKV",
    "xLSTMForCausalLM": "xLSTM",
    "RecurrentGemmaForCausalLM": "RecurrentGemma's RG-LRU",
    "MiniMaxText01ForCausalLM": "lightning attention",
    "MiniMaxM1ForCausalLM": "lightning attention",
    "BailingMoeV2_5ForCausalLM": "lightning attention",
    "BailingMoeLinearV2ForCausalLM": "lightning attention",
    "BailingHybridForCausalLM": "Kimi Delta Attention with other gates",
    "KimiK3ForConditionalGeneration": "Kimi K3's, between residuals of its own",
    "InklingForConditionalGeneration": "Inkling's convolutions",
    "Lfm3ForCausalLM": "LFM3's convolutions",
    "ZayaForCausalLM": "convolutions within attention",
}


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", RECURRENT_KINDS)
def test_kinds_of_recurrent_layers_are_named(name, impl):
    why = f"it has recurrent layers of a kind that is not served: {RECURRENT_KINDS[name]}"
    with pytest.raises(ModelConfigError) as error:
        parse_model_config({"architectures": [name], "text_config": {"model_type": "kimi_linear"}}, model_impl=impl)
    assert str(error.value) == f"architecture {name} is not supported: {why}"


def test_a_kimi_linear_model_with_parts_of_kimi_k3_is_refused_by_field():
    fields = json.loads((Path(__file__).parent / "published_fields.json").read_bytes())["Kimi-Linear-48B-A3B"]
    with pytest.raises(ModelConfigError, match=r"config\.json sets attn_res_block_size: not known for kimi_linear models"):
        parse_model_config({**fields, "attn_res_block_size": 4}, model_impl="quire")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index_topk": 2048}, "its attention is sparse"),
        ({"text_config": {"index_topk": 2048}}, "its attention is sparse"),
        ({"sparse_attention_config": {"sparse_attention_freq": [0, 1]}}, "its attention is sparse"),
        ({"sparse_attention_config": {"sparse_attention_freq": 1}}, "its attention is sparse"),
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
