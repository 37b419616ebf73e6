"""Sampling defaults of a model: one meaning of the file, for the core that lets it in and for frontends that use it."""

import json
import logging
import logging.handlers
import queue

import pytest
import toy_tokenizers

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import frontend_files, model_summary
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.generation_config import generation_defaults, passed_over

CONFIG = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "max_new_tokens": 5, "eos_token_id": [1]}
TAKEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 5}


def test_what_sampling_params_know_is_taken():
    assert generation_defaults(CONFIG) == generation_defaults({**CONFIG, "do_sample": True}) == TAKEN
    assert generation_defaults({}) == {}


def test_a_model_that_does_not_sample_is_greedy():
    assert generation_defaults({**CONFIG, "do_sample": False}) == {**TAKEN, "temperature": 0.0}
    assert generation_defaults({"do_sample": False}) == {"temperature": 0.0}


@pytest.fixture
def lines():
    """The core's lines of the log."""
    kept, logger = logging.handlers.QueueHandler(queue.SimpleQueue()), logging.getLogger("quire.enginecore")
    logger.addHandler(kept)
    yield kept.queue
    logger.removeHandler(kept)


def test_fields_that_are_passed_over_are_named_once_at_launch(tmp_path, lines):
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "length_penalty": 1.0, "bad_words_ids": None, "suppress_tokens": []}
    bookkeeping = {"transformers_version": "4.57.1", "_from_model_config": True, "pad_token_id": 0, "do_sample": True}
    assert passed_over({**CONFIG, **neutral, **bookkeeping}) == []
    others = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "max_length": 20}
    for name, data in toy_tokenizers.files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "generation_config.json").write_text(json.dumps({**CONFIG, **neutral, **others}))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400, "max_position_embeddings": 64}))
    model_summary(tmp_path)
    said = lines.get_nowait().getMessage()
    assert "passed over are max_length, no_repeat_ngram_size, num_beams, suppress_tokens;" in said and lines.empty()
    model_summary(tmp_path, generation_config="vllm")
    assert lines.empty()


BAD = [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 7}, {"max_new_tokens": 1.5}, {"top_k": True}, {"min_p": [0.1]}]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_sampling_params_refuse_is_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name.replace('max_new_tokens', 'max_tokens')} must"):
        generation_defaults({**CONFIG, **bad})


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "do_sample": False}, *({**CONFIG, **bad} for bad in BAD)], ids=str)
def test_core_and_frontend_take_the_same_files(tmp_path, config):
    """Before, one refused what the other left out, and only one knew do_sample."""
    for name, data in toy_tokenizers.files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    files = frontend_files(tmp_path)
    try:
        model_summary(tmp_path)
        let_in = True
    except ModelFilesError:
        let_in = False
    if let_in:
        assert Tokenizer.from_files(files).generation_defaults == generation_defaults(config)
    else:
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            Tokenizer.from_files(files)


def test_overrides_take_the_place_of_the_files_fields(tmp_path):
    for name, data in toy_tokenizers.files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5, "eos_token_id": 3}))
    overrides = {"temperature": 0.9, "max_new_tokens": 7, "eos_token_id": [4]}
    for source, expected in (("auto", {"temperature": 0.9, "top_k": 5, "max_tokens": 7}),
                             ("vllm", {"temperature": 0.9, "max_tokens": 7})):  # fmt: skip
        files = frontend_files(tmp_path, generation_config=source, generation_overrides=overrides)
        assert Tokenizer.from_files(files).generation_defaults == expected
    summary = model_summary(tmp_path, hf_overrides={"max_position_embeddings": 32}, generation_overrides=overrides)
    assert summary.max_model_len == 32 and 4 in summary.eos_token_ids and 3 not in summary.eos_token_ids
    for wrong in ({"temprature": 1}, {"temperature": "hot"}):
        with pytest.raises(ModelFilesError, match=r"--override-generation-config: .*temp"):
            model_summary(tmp_path, generation_overrides=wrong)
