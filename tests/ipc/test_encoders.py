"""The core's list of encoders is the worker's, and both know how long texts may be."""

import json

import pytest

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import model_summary, resolve_model
from quire.enginecore.loading.pooling_files import module_folders, more_patterns
from quire.ipc.encoders import ARCHITECTURES, is_encoder, longest_text
from quire.workers.models.encoders.table import ENCODERS, read_encoder_config

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def test_both_tables_have_the_same_architectures():
    assert ENCODERS.keys() == ARCHITECTURES
    assert is_encoder({"architectures": ["BertModel"]}) and not is_encoder({"architectures": ["LlamaForCausalLM"]})
    assert not is_encoder({}) and not is_encoder({"architectures": "BertModel"})


@pytest.mark.parametrize(
    ("name", "more", "longest"),
    [
        ("BertModel", {}, 514),
        ("RobertaModel", {}, 512),
        ("XLMRobertaModel", {"pad_token_id": 1}, 512),
        ("RobertaForSequenceClassification", {"pad_token_id": 0}, 513),
        ("XLMRobertaModel", {"position_embedding_type": "rotary"}, 514),
        ("MPNetModel", {}, 512),
    ],
)
def test_both_know_the_longest_text(tmp_path, name, more, longest):
    fields = {**SIZES, "architectures": [name], "max_position_embeddings": 514, **more}
    assert longest_text(fields, 514) == longest
    config = read_encoder_config(fields, name)
    assert (config.longest or config.max_position_embeddings) == longest
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert model_summary(tmp_path).max_model_len == longest and model_summary(tmp_path).is_encoder
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert model_summary(tmp_path).max_model_len == 128


def test_files_of_pooling_models_are_asked_for(tmp_path):
    assert more_patterns(tmp_path, has_safetensors=False) == [] == module_folders(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["XLMRobertaModel"]}')
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "../x"}, {"path": 3}, 4, {"path": ".."}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert module_folders(tmp_path) == ["1_Pooling"]
    assert "1_Pooling/config.json" in more_patterns(tmp_path, has_safetensors=True)
    assert "pytorch_model.bin" not in more_patterns(tmp_path, has_safetensors=True)
    assert "pytorch_model.bin" in more_patterns(tmp_path, has_safetensors=False)


def test_weights_of_torch_save_are_an_encoders_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for name, is_served in (("XLMRobertaModel", True), ("LlamaForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        if is_served:
            assert resolve_model(str(tmp_path)) == tmp_path
        else:
            with pytest.raises(ModelFilesError, match="safetensors only"):
                resolve_model(str(tmp_path))
