"""Mistral 4, Llama 4 and Gemma 4: what their configs say where it is absent, what they are refused for, and their sizes."""

import pytest
import torch

from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.families import parse_model_config
from quire.workers.parallel import Parallel

MISTRAL4 = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}


def parameters(fields):
    """In billions."""
    with torch.device("meta"):
        model = build_model(parse_model_config(fields), torch.bfloat16, Parallel(device="meta"))
    return sum(p.numel() for p in model.parameters()) / 1e9


def within(fields, **changes):
    """With these in its text_config."""
    return {**fields, "text_config": {**fields["text_config"], **changes}}


def test_mistral_small_4_has_119_billion_parameters():
    assert parameters(MISTRAL4) == pytest.approx(119, rel=0.01)
    config = parse_model_config(MISTRAL4)
    assert config.architecture == "Mistral4ForCausalLM"
    spec = config.layers[0].attention
    assert (spec.head_dim, spec.latent_dim, spec.rope.type, spec.temperature.beta) == (320, 256, "yarn", 0.1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (within(MISTRAL4, attention_bias=True), "attention_bias"),
        (within(MISTRAL4, partial_rotary_factor=0.3), "partial_rotary_factor"),
        (within(MISTRAL4, num_dreams=3), "num_dreams"),
        (within(MISTRAL4, n_group=3), "n_group 3"),
    ],
)
def test_what_cannot_be_served_is_said(fields, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config(fields)
