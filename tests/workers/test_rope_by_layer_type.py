"""Rotary parameters by layer type, of Gemma 3, Gemma 4 and OLMo 3: their tables are transformers', in whichever fields they
stand; what transformers passes over there is refused, for a config that says it means it.
"""

import json

import pytest
import tiny_families
import tiny_models
import torch
import transformers

from quire.workers.attention.rope import cos_sin_table
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config

POSITIONS = 300
FULL, LOCAL = "full_attention", "sliding_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 50.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 30.0}
EMBEDDINGS = {
    "gemma3": transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding,
    "gemma4": transformers.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding,
    "olmo3": transformers.models.olmo3.modeling_olmo3.Olmo3RotaryEmbedding,
}
BOTH = ("gemma3", "olmo3")


def fields_of(family, changes):
    """config.json of the family's tiny model, rotary parameters being `changes`."""
    fields = json.loads((tiny_models.tiny_model(family) / "config.json").read_bytes())
    return {**{name: value for name, value in fields.items() if name != "rope_parameters"}, **changes}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"rope_scaling": LINEAR, "rope_theta": 40.0}) for family in BOTH),
        *((family, {"rope_scaling": LINEAR, "rope_parameters": {FULL: DEFAULT, LOCAL: YARN}}) for family in BOTH),
        *((family, {"rope_parameters": {FULL: YARN}, ORIGINAL: 16}) for family in BOTH),
        ("gemma4", {"rope_parameters": {FULL: {**YARN, ORIGINAL: 64}, LOCAL: DEFAULT}, ORIGINAL: 16}),
    ],
)
def test_tables_are_transformers(family, changes):
    fields = fields_of(family, changes)
    config_class = getattr(transformers, tiny_families.CLASSES[family][0])
    theirs = EMBEDDINGS[family](config_class.from_dict(json.loads(json.dumps(fields))))
    ours = {LOCAL if layer.attention.window else FULL: layer.attention for layer in parse_model_config(fields).layers}
    assert ours.keys() == {FULL, LOCAL}
    for name, attention in ours.items():
        cos, sin = theirs(torch.zeros(1), torch.arange(POSITIONS)[None], name)
        half = cos.shape[-1] // 2
        expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
        assert torch.equal(cos_sin_table(attention, POSITIONS), expected), name


@pytest.mark.parametrize(
    ("families", "changes", "said"),
    [
        (BOTH, {"rope_parameters": LINEAR}, "rope_parameters sets factor, rope_type outside of full_attention"),
        (BOTH, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling sets type: only rope_type"),
        (EMBEDDINGS, {"rope_parameters": {FULL: {**YARN, "truncate": False}, LOCAL: DEFAULT}}, "sets truncate to false"),
        (BOTH, {"sliding_window": None, "layer_types": None}, "sliding_attention need a sliding window"),
    ],
)
def test_what_transformers_passes_over_is_refused(families, changes, said):
    for family in families:
        with pytest.raises(ModelConfigError, match=said):
            parse_model_config(fields_of(family, changes))


@pytest.mark.parametrize("family", ["gemma3", "cohere2"])
def test_a_pattern_that_transformers_does_not_read_is_passed_over(family):
    plain = fields_of(family, {"layer_types": None, "num_hidden_layers": 8})
    assert parse_model_config({**plain, "_sliding_window_pattern": 2}).layers == parse_model_config(plain).layers
    assert parse_model_config({**plain, "sliding_window_pattern": 2}).layers != parse_model_config(plain).layers
