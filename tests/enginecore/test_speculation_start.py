"""The start of an engine says which drafter it has, and what it cannot have."""

import json
import logging
import shutil

import msgspec
import pytest

from quire.enginecore import daemon
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import BUNDLED, model_summary
from quire.enginecore.loading.speculation_start import drafts_told, say_drafts, with_draft_model, with_verifier
from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import DraftsTold
from quire.ipc.speculative_config import SpeculativeConfig
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
        (
            {"method": "draft_model", "model": "a/b", "max_model_len": 99},
            ["7 drafts a sequence and step, by the draft model a/b, in"],
        ),
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


@pytest.fixture
def draft(tmp_path):
    """The folder of a draft model with the bundled model's tokenizer, whose files tests may change."""
    folder = tmp_path / "draft"
    shutil.copytree(BUNDLED, folder)
    return folder


def found_for(folder, **more) -> SpeculativeConfig | None:
    asked = speculation_of({"method": "draft_model", "model": str(folder)})
    config = EngineConfig(speculative_config=msgspec.structs.replace(asked, **more))
    return with_draft_model(config, BUNDLED, (BUNDLED / "tokenizer.json").read_bytes()).speculative_config


def test_a_draft_model_is_found_with_its_context(draft) -> None:
    asked = speculation_of({"model": str(draft)})
    assert found_for(draft) == msgspec.structs.replace(asked, model=str(draft), max_model_len=2048)
    assert found_for(draft, max_model_len=100).max_model_len == 100
    assert found_for(draft, max_model_len=9999).max_model_len == 2048
    for other in (None, NGRAM):
        config = EngineConfig(speculative_config=other)
        assert with_draft_model(config, BUNDLED, b"") is config


def test_a_head_needs_no_tokenizer(draft) -> None:
    (draft / "tokenizer.json").unlink()
    asked = speculation_of({"method": "eagle3", "model": str(draft)})
    config = EngineConfig(speculative_config=asked)
    assert with_draft_model(config, BUNDLED, b"").speculative_config == asked
    (draft / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"^--speculative-config: model .* has no model.safetensors"):
        with_draft_model(config, BUNDLED, b"")


def change(path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_tokenizer_may_differ_in_what_is_no_token(draft) -> None:
    change(draft / "tokenizer.json", truncation={"direction": "Right"}, padding=None, post_processor=None)
    assert found_for(draft) is not None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda folder: change(folder / "tokenizer.json", added_tokens=[]), "its tokenizer has other tokens than the model's"),
        (lambda folder: change(folder / "tokenizer.json", normalizer={"type": "NFC"}), "its tokenizer has other tokens"),
        (lambda folder: change(folder / "config.json", layer_types=["linear_attention"] * 6), "it has recurrent layers"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: shutil.rmtree(folder), "is neither a folder nor a hub id"),
    ],
)
def test_one_line_says_what_a_draft_model_lacks(draft, how, said: str) -> None:
    how(draft)
    with pytest.raises(ModelFilesError, match=r"^--speculative-config: model ") as refused:
        found_for(draft)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_workers_on_other_hosts_have_no_draft_model(draft) -> None:
    config = EngineConfig(speculative_config=speculation_of({"model": str(draft)}), distributed_executor_backend="ray")
    with pytest.raises(ModelFilesError, match="several hosts"):
        with_draft_model(config, BUNDLED, b"")


def test_what_answers_tell() -> None:
    told = {}
    for level in ("none", "summary", "detailed"):
        assert drafts_told(EngineConfig(per_request_spec_decode_metrics=level)) is None
        told[level] = drafts_told(EngineConfig(per_request_spec_decode_metrics=level, speculative_config=NGRAM))
    assert told == {"none": None, "summary": DraftsTold(False, 3), "detailed": DraftsTold(True, 3)}


HEAD = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}


def test_a_folder_that_names_its_verifier_is_served_with_it(draft, tmp_path) -> None:
    head = tmp_path / "some-head"
    head.mkdir()
    named = {"verifier": {"name_or_path": str(draft)}, "proposal_methods": [{"speculative_tokens": 3}]}
    (head / "config.json").write_text(json.dumps({**HEAD, "speculators_config": named}))
    config, folder = with_verifier(EngineConfig(model=str(head), revision="r"), head)
    assert (config.model, config.revision, folder, config.served_model_name) == (str(draft), None, draft, [str(head)])
    assert config.speculative_config == SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3)
    plain = EngineConfig(model=str(draft))
    assert with_verifier(plain, draft) == (plain, draft)


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({}, {}, "does not name its verifier"),
        ({"speculators_config": {"verifier": {"name_or_path": "not there"}}}, {}, "with not there as its verifier: "),
        ({}, {"speculative_config": NGRAM}, "leave --speculative-config out"),
        (
            {"speculators_model_type": "dflash", "speculators_config": {"verifier": {"name_or_path": "a/b"}}},
            {},
            "with a/b as its verifier: --speculative-config: method 'dflash'",
        ),
    ],
    ids=str,
)
def test_one_line_says_why_a_drafter_cannot_be_served(tmp_path, changes, flags, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HEAD, **changes}))
    with pytest.raises(ModelFilesError) as refused:
        with_verifier(EngineConfig(model=str(tmp_path), **flags), tmp_path)
    assert said in str(refused.value) and "\n" not in str(refused.value)
