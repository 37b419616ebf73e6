"""The rotary table equals transformers' to the last bit, for every type that is supported."""

import pytest
import tiny_models
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.workers.attention.rope import attention_factor, cos_sin_table
from quire.workers.models.family_table import parse_model_config

POSITIONS = 3000
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 512}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.75},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-one-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-factor-below-1": {**YARN, "factor": 1.0},
    "yarn-from-ratio": {**YARN, "factor": None},
}


def both(rope, head_dim):
    theirs = LlamaConfig(**{**tiny_models.BASE, "head_dim": head_dim, "rope_parameters": dict(rope)})
    ours = parse_model_config(
        {**tiny_models.BASE, "architectures": ["LlamaForCausalLM"], "head_dim": head_dim, "rope_parameters": rope}
    )
    return theirs, ours.layers[0].attention


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_table_equals_transformers(name, head_dim):
    theirs, ours = both(ROPES[name], head_dim)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(POSITIONS)[None])
    table = cos_sin_table(ours, POSITIONS)
    assert table.dtype == torch.float32 and table.shape == (POSITIONS, head_dim)
    half = head_dim // 2
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_attention_factor_is_yarns_alone():
    assert attention_factor(both(ROPES["linear"], 64)[1].rope) == 1.0
    assert attention_factor(both(ROPES["yarn"], 64)[1].rope) == pytest.approx(1.1386294)
