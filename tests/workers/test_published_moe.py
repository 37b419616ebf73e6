"""Mixtures of experts as they are published: config.json as it is on the hub is read, to the right number of parameters."""

import json
from pathlib import Path

import pytest
import torch

from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import parse_model_config, read_model_config
from quire.workers.parallel import Parallel

FOLDER = Path(__file__).parent / "published"
PARAMETERS = {  # in billions, as the model cards say
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3": 671.0,
    "GLM-4.5-Air": 107.0,
    "MiniMax-M2": 228.7,
    "Mixtral-8x7B-v0.1": 46.7,
    "OLMoE-1B-7B-0924": 6.92,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen2-57B-A14B": 57.4,
    "Qwen3-30B-A3B": 30.5,
    "gpt-oss-20b": 20.9,
}


def fields_of(name):
    return json.loads((FOLDER / name / "config.json").read_bytes())


def test_each_has_a_number():
    assert {path.name for path in FOLDER.iterdir()} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_is_read_to_the_right_size(name):
    config = read_model_config(FOLDER / name)
    with torch.device("meta"):
        model = build_model(config, torch.bfloat16, Parallel(device="meta"))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert count == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_unknown_field_is_refused(name):
    with pytest.raises(ModelConfigError, match="num_dreams"):
        parse_model_config({**fields_of(name), "num_dreams": 3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 is more"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts": 100_000}, "at most"),
        ({"num_local_experts": 64}, "num_local_experts and num_experts differ"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_what_cannot_be_served_is_said(changes, words):
    with pytest.raises(ModelConfigError, match=words):
        parse_model_config({**fields_of("Qwen3-30B-A3B"), **changes})


def test_a_clamp_of_olmoe_is_refused_as_what_it_is_and_may_be_null():
    """Not as an unknown field, with the advice to take it out: then the model would run without its clamp."""
    fields = fields_of("OLMoE-1B-7B-0924")
    assert parse_model_config({**fields, "clip_qkv": None}) == parse_model_config(fields)
    with pytest.raises(ModelConfigError, match=r"^config.json sets clip_qkv to 8.0: only None is supported for olmoe models$"):
        parse_model_config({**fields, "clip_qkv": 8.0})


def test_layers_without_end_are_refused():
    with pytest.raises(ModelConfigError, match="num_nextn_predict_layers must be an integer from 0 to"):
        parse_model_config({**fields_of("DeepSeek-V3"), "num_nextn_predict_layers": 1 << 40})


def test_gpt_oss_without_rotary_parameters_has_yarn():
    """null, an empty object of old, or nothing at all; an empty object of new is a plain rotation."""
    plain = {name: value for name, value in fields_of("gpt-oss-20b").items() if name != "rope_scaling"}
    for changes in ({}, {"rope_scaling": None}, {"rope_scaling": {}}):
        assert parse_model_config({**plain, **changes}).layers[0].attention.rope.type == "yarn"
    assert parse_model_config({**plain, "rope_parameters": {}}).layers[0].attention.rope.type == "default"
