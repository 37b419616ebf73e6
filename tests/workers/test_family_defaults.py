"""A field that config.json leaves out has the value that transformers gives it: for each family and each of its fields."""

import json

import msgspec
import pytest
import tiny_families
import tiny_models
import tiny_moe
import transformers

from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.families import parse_model_config

NAMES = [*tiny_models.MODELS, *tiny_families.MODELS, *tiny_moe.MODELS]
FAMILIES = {tiny_models.ALL_MODELS[name][0]: name for name in reversed(NAMES)}
ALWAYS = {"gemma3-images", "deepseek_v3", "ministral3", "gpt_oss", "minimax_m2"}


def parsed(fields) -> ModelConfig | None:
    """None: refused."""
    try:
        config = parse_model_config(fields)
    except ModelConfigError:
        return None
    return msgspec.structs.replace(config, dtype=None, initializer_range=0.0)


def left_out(fields):
    """(a field's name, the others), and of rotary embeddings' objects their own."""
    for name, value in fields.items():
        if name not in ("architectures", "model_type"):
            yield name, {key: other for key, other in fields.items() if key != name}
        if name in ("rope_parameters", "full_attention", "sliding_attention") and isinstance(value, dict):
            yield from ((f"{name}.{inner}", {**fields, name: rest}) for inner, rest in left_out(value))


@pytest.mark.parametrize("family", [f if f in ALWAYS else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_an_absent_field_has_transformers_default(family):
    config_class = getattr(transformers, tiny_families.CLASSES[family][0])
    fields = json.loads((tiny_models.tiny_model(FAMILIES[family]) / "config.json").read_bytes())
    text, compared = fields.get("text_config", fields), 0
    for name, rest in left_out(text):
        less = {**fields, "text_config": rest} if "text_config" in fields else rest
        try:
            filled = config_class.from_dict(json.loads(json.dumps(less))).to_dict()
        except Exception:  # validators of transformers' raise what they like of defaults that do not fit such a small model
            continue
        ours, theirs = parsed(less), parsed({**json.loads(json.dumps(filled)), "architectures": fields["architectures"]})
        if ours is not None and theirs is not None:
            assert ours == theirs, name
            compared += 1
    assert compared > len(text) / 2
