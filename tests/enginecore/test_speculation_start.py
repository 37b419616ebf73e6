"""The start of an engine says which drafter it has, and what it cannot have."""

import logging

import msgspec
import pytest

from quire.enginecore import daemon
from quire.enginecore.loading.model_files import BUNDLED, model_summary
from quire.enginecore.loading.speculation_start import drafts_told, say_drafts
from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import DraftsTold
from quire.ipc.speculative_options import speculation_of

NGRAM = speculation_of({"method": "ngram", "num_speculative_tokens": 3})
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


@pytest.mark.parametrize("keeps_states", [False, True])
def test_models_with_recurrent_layers_speculate_like_others(keeps_states: bool) -> None:
    summary = msgspec.structs.replace(model_summary(BUNDLED), keeps_states=keeps_states)
    for speculation in (None, NGRAM):
        config = EngineConfig(device="cpu", max_num_seqs=4, host_memory_bytes=1 << 30, speculative_config=speculation)
        assert daemon.worker_config(config, BUNDLED, summary).engine.speculative_config == speculation


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["speculation: up to 15 drafts a sequence and step, by ngram of 5 to 5 tokens"]),
        ({"num_speculative_tokens": 40}, ["by ngram", "num_speculative_tokens 40: at most 15 tokens are drafted"]),
        (SYNTHETIC, ["by ngram", "answers are wrong"]),
    ],
    ids=str,
)
def test_the_log_says_what_is_drafted(
    options: dict[str, object], said: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire.enginecore")
    say_drafts(None)
    say_drafts(speculation_of({"method": "ngram", **options}))
    assert len(caplog.messages) == len(said)
    assert all(text in line for text, line in zip(said, caplog.messages, strict=True))


def test_what_answers_tell() -> None:
    told = {}
    for level in ("none", "summary", "detailed"):
        assert drafts_told(EngineConfig(per_request_spec_decode_metrics=level)) is None
        told[level] = drafts_told(EngineConfig(per_request_spec_decode_metrics=level, speculative_config=NGRAM))
    assert told == {"none": None, "summary": DraftsTold(False, 3), "detailed": DraftsTold(True, 3)}
