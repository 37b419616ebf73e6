"""A field that config.json leaves out has the value that transformers gives it, or both refuse: for each family and field.

Each config is read with several numbers of heads: a default that is a constant in transformers' class, and follows from the
heads here, is right for one of them.
"""

import json

import msgspec
import pytest
import tiny_families
import tiny_hybrids
import tiny_models
import tiny_moe
import transformers

from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.models.fields import words

NAMES = [*tiny_models.MODELS, *tiny_families.MODELS, *tiny_moe.MODELS]
HYBRIDS = {family: name for name, (family, _) in tiny_hybrids.MODELS.items() if family.startswith(("lfm2", "kimi"))}
FAMILIES = {tiny_models.ALL_MODELS[name][0]: name for name in reversed(NAMES)}
ALWAYS = {"gemma3-images", "deepseek_v3", "ministral3", "gpt_oss", "minimax_m2", "smollm3", "seed_oss", "gpt_neox"}
HEADS = (None, 8, 16, 32)
# Every published config has them, and what transformers takes without them fits no other model than the one it was taken from.
REQUIRED = words(
    "vocab_size hidden_size n_embd intermediate_size num_hidden_layers n_layer num_attention_heads n_head n_positions",
    "max_position_embeddings num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size",
    "model_max_length kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
)
# Served though transformers 5.23 refuses it: yarn's factor follows from the positions, as from a factor of null.
SERVED = {"rope_parameters.factor", "rope_parameters.full_attention.factor"}


def parsed(fields) -> tuple[ModelConfig | None, str]:
    """(None, why): refused."""
    try:
        config = parse_model_config(fields)
    except ModelConfigError as error:
        return None, str(error)
    return msgspec.structs.replace(config, dtype=None, initializer_range=0.0), ""


def left_out(fields):
    """(a field's name, the others), and of rotary embeddings' objects their own."""
    for name, value in fields.items():
        if name not in ("architectures", "model_type"):
            yield name, {key: other for key, other in fields.items() if key != name}
        if name in ("rope_parameters", "full_attention", "sliding_attention") and isinstance(value, dict):
            yield from ((f"{name}.{inner}", {**fields, name: rest}) for inner, rest in left_out(value))


def with_heads(fields, count):
    """So many attention heads of the same size, half as many of keys and values. None: as it is."""
    if count is None:
        return fields
    name = next(name for name in ("num_attention_heads", "n_head") if name in fields)
    hidden = next(name for name in ("hidden_size", "n_embd") if name in fields)
    kv_heads = {"num_key_value_heads": count // 2} if fields.get("num_key_value_heads") else {}
    return {**fields, **kv_heads, name: count, hidden: fields[hidden] // fields[name] * count}


def filled_by_transformers(family, fields):
    """None: it refuses them."""
    config_class = getattr(transformers, {**tiny_families.CLASSES, **tiny_hybrids.CLASSES}[family][0])
    try:
        filled = config_class.from_dict(json.loads(json.dumps(fields))).to_dict()
    except Exception:  # validators of transformers' raise what they like
        return None
    return {**json.loads(json.dumps(filled)), "architectures": fields["architectures"]}


@pytest.mark.parametrize(
    "family", [f if f in ALWAYS else pytest.param(f, marks=pytest.mark.slow) for f in (*FAMILIES, *HYBRIDS)]
)
def test_an_absent_field_has_transformers_default(family):
    fields = json.loads((tiny_models.tiny_model({**FAMILIES, **HYBRIDS}[family]) / "config.json").read_bytes())
    text, compared = fields.get("text_config", fields), 0
    for heads in HEADS:
        for name, rest in left_out(with_heads(text, heads)):
            less = {**fields, "text_config": rest} if "text_config" in fields else rest
            (ours, why), filled = parsed(less), filled_by_transformers(family, less)
            theirs = None if filled is None else parsed(filled)[0]
            if ours is not None and theirs is not None:
                assert ours == theirs, (name, heads)
                compared += 1
            elif theirs is not None:
                assert name in REQUIRED and "lacks" in why and "\n" not in why, (name, heads, why)
            elif ours is not None:
                assert name in SERVED, (name, heads)
    assert compared > len(HEADS) * len(text) / 2
