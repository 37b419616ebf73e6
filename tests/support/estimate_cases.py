"""Shared by tests of `quire estimate`: a published config, a folder with one, and what is read from it."""

import json

from quire.frontend.cli.estimate_model import read_model

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def read(name, **overrides):
    return read_model(str(name), None, None, None, overrides)
