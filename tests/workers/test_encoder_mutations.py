"""The tests of equality see each quirk of an encoder: one that has it wrong gives other hidden states.

Not a test of the engine but of the tiny models: a quirk that changes nothing in them could be lost unseen.
"""

import json

import msgspec
import pytest
import torch
import transformers
from encoder_cases import POSITIONS, our_hidden, pair, texts, their_hidden, types_of
from mutations import attention, layers, rope, swapped_bases, window
from workers.test_encoders import CASES, HAS_TYPES

from quire.workers.loading.weights import load_weights
from quire.workers.models.encoders.table import build_encoder, read_encoder_config
from quire.workers.parallel import Parallel

replace = msgspec.structs.replace
RUN = texts([POSITIONS])


def encoder(**changes):
    return lambda config: replace(config, encoder=replace(config.encoder, **changes))


CAUSAL = attention(is_causal=True)
ROTARY = ("modernbert", "embedding-gemma", "nomic", "gte", "eurobert", "jina-v3")
WINDOWED = ("modernbert", "embedding-gemma")
LEARNED = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")
# (model, what is wrong) -> a change of its config
MUTATIONS = {
    **{(name, "a causal mask"): CAUSAL for name in CASES if name not in ("gemma3-causal", "bert-relu")},
    ("gemma3-causal", "two-way"): attention(is_causal=False),
    **{(name, "window + 1"): window(1) for name in WINDOWED},
    **{(name, "window - 1"): window(-1) for name in WINDOWED},
    **{(name, "no rotation"): attention(rope=None) for name in ROTARY},
    **{(name, "another base"): rope(theta=500.0) for name in ROTARY},
    **{(name, "bases swapped"): swapped_bases for name in WINDOWED},
    ("mpnet", "no bias by distance"): encoder(num_buckets=0),
    ("bert", "relu for gelu"): layers(activation="relu"),
    ("bert", "tanh-approximated gelu"): layers(activation="gelu_tanh"),
    ("nomic", "gelu for silu"): layers(activation="gelu"),
    ("gte", "silu for gelu"): layers(activation="silu"),
    ("embedding-gemma", "scale of the head size"): attention(scale=lambda spec: spec.head_dim**-0.5),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    kept = {}

    def make(name):
        if name not in kept:
            cls, fields = CASES[name]
            cls, folder = getattr(transformers, cls), tmp_path_factory.mktemp(name)
            kept[name] = folder, their_hidden(pair(cls, cls.config_class(**fields), folder).theirs, RUN[0])
        return kept[name]

    return make


def changed(folder, change):
    fields = json.loads((folder / "config.json").read_text())
    config = change(read_encoder_config(fields, fields["architectures"][0]))
    model = build_encoder(config, torch.float32, Parallel())
    config = replace(config, names=config.names._replace(ignored=(*config.names.ignored, "model.relative_attention_bias.")))
    model.config = config if not config.encoder.num_buckets else model.config
    load_weights(model, folder, "cpu", progress=False)
    return model


@pytest.mark.parametrize(("name", "what"), MUTATIONS)
def test_a_mutation_is_seen(made, name, what):
    folder, expected = made(name)
    got = our_hidden(changed(folder, MUTATIONS[name, what]), RUN)[0]
    # an activation's approximation changes little; everything else changes much more than rounding does
    assert (got - expected).abs().max() > (1e-4 if what == "tanh-approximated gelu" else 1e-2)


@pytest.mark.parametrize("name", CASES)
def test_a_right_model_is_told_from_these(made, name):
    folder, expected = made(name)
    assert (our_hidden(changed(folder, lambda config: config), RUN)[0] - expected).abs().max() < 2e-5


@pytest.mark.parametrize("name", LEARNED)
def test_a_position_too_far_is_seen(made, name):
    folder, _ = made(name)
    rows = texts([POSITIONS - 1])
    right, wrong = (
        changed(folder, encoder_first(step)) for step in (0, 1)
    )  # fmt: skip
    assert (our_hidden(right, rows)[0] - our_hidden(wrong, rows)[0]).abs().max() > 1e-2


def encoder_first(step):
    return lambda config: replace(config, encoder=replace(config.encoder, first_position=config.encoder.first_position + step))


@pytest.mark.parametrize("name", sorted(HAS_TYPES))
def test_lost_token_types_are_seen(made, name):
    folder, expected = made(name)
    model = changed(folder, lambda config: config)
    assert (our_hidden(model, RUN, types_of(RUN))[0] - expected).abs().max() > 1e-2
