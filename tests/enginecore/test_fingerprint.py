"""Models told apart by their files: equal copies are one model, whatever else differs is another."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.enginecore.loading.fingerprint import SAMPLE_BYTES, fingerprints, model_digest, size_of
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import frontend_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(1_000_000))
    (made / "consolidated.safetensors").write_bytes(b"a second copy")
    (made / "tokenizer.json").write_text("{}")  # compared with others that frontends get
    return made


def test_a_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "consolidated.safetensors").unlink()
    found = fingerprints(folder, True)
    assert found == fingerprints(copy, True) and set(found) == {"config.json", "model.safetensors"}
    assert size_of(found["model.safetensors"]) == "1000000"
    assert model_digest(folder, True, None) == model_digest(copy, True, {})


@pytest.mark.parametrize("at", [0, 500_000, 1_000_000 - SAMPLE_BYTES])
def test_weights_of_one_size_are_told_apart(folder: Path, at: int) -> None:
    before = model_digest(folder, True, None)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"x" * min(40_000, 1_000_000 - at))
    assert model_digest(folder, True, None) != before
    assert model_digest(folder, False, None) == model_digest(folder, False, {})


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (3, 4)])  # fifths of the tensors in which the models differ
@pytest.mark.parametrize("num_files", [1, 163])
def test_weights_in_many_files_are_told_apart(tmp_path: Path, num_files: int, first: int, last: int) -> None:
    """Files of one size that begin with equal headers, longer than a sample, and end alike."""
    header = b'{"t":{"dtype":"BF16"}}'.ljust(2 * SAMPLE_BYTES)
    data = bytearray(20 * SAMPLE_BYTES)
    found = []
    for name, value in (("a", b"\0"), ("b", b"\1")):
        (tmp_path / name).mkdir()
        data[first * 4 * SAMPLE_BYTES : last * 4 * SAMPLE_BYTES] = value * 4 * SAMPLE_BYTES
        for i in range(num_files):
            file = tmp_path / name / f"model-{i:05d}.safetensors"
            file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        found.append(fingerprints(tmp_path / name, True))
    assert len(found[0]) == num_files
    assert all(found[0][name] != found[1][name] for name in found[0])


@pytest.mark.parametrize("length", [b"", b"\xff" * 8, bytes(8), b"{}"])
def test_files_that_are_no_safetensors_have_fingerprints_too(folder: Path, length: bytes) -> None:
    (folder / "model.safetensors").write_bytes(length)
    assert size_of(fingerprints(folder, True)["model.safetensors"]) == str(len(length))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a_config":' * 500 + "{}" + "}" * 500, "", "\ufffe"])
def test_settings_that_cannot_be_read_are_told_apart(folder: Path, text: str) -> None:
    """They are refused where they are used."""
    digests = [model_digest(folder, True, None)]
    for written in (text, text, text + "]"):
        (folder / "config.json").write_text(written)
        digests.append(model_digest(folder, True, None))
    assert digests[1] == digests[2] and len(set(digests)) == 3


def test_settings_overrides_and_files_count(folder: Path) -> None:
    digests = [model_digest(folder, True, None), model_digest(folder, False, None), model_digest(folder, True, {"a": 1})]
    (folder / "config.json").write_text('{"head_dim": null}')
    digests.append(model_digest(folder, True, None))
    (folder / "more.safetensors").write_bytes(b"")
    digests.append(model_digest(folder, True, None))
    assert len(set(digests)) == 5


SAVED = [  # config.json of one model, by several programs
    {"hidden_size": 8, "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": True},
    {"_name_or_path": "/data/models/it", "dtype": "torch.bfloat16", "torch_dtype": None, "hidden_size": 8},
    {"dtype": "bfloat16", "hidden_size": 8, "_attn_implementation": "eager", "unsloth_version": "2026.1"},
]


@pytest.mark.parametrize("nested", [False, True])
def test_who_wrote_the_settings_does_not_count(folder: Path, nested: bool) -> None:
    def digest(fields: dict[str, Any]) -> str:
        (folder / "config.json").write_text(json.dumps({"text_config": fields} if nested else fields, indent=len(fields)))
        return model_digest(folder, True, None)

    assert len({digest(fields) for fields in SAVED}) == 1
    others = [{"dtype": "float16"}, {"dtype": None}, {"hidden_size": 16}, {"head_dim": None}, {"model_type": "llama"}]
    assert len({digest({**SAVED[2], **other}) for other in others}) == len(others)
    assert digest(SAVED[0]) not in {digest({**SAVED[2], **other}) for other in others}


def test_frontends_get_equal_files_of_copies_that_others_saved(folder: Path) -> None:
    """By whose digests engines are compared, too."""
    found = []
    for written in ({"top_k": 5, "transformers_version": "4.50.0"}, {"_from_model_config": True, "top_k": 5}, {"top_k": 6}):
        (folder / "generation_config.json").write_text(json.dumps(written))
        found.append(frontend_files(folder)["generation_config.json"])
    assert found[0] == found[1] != found[2]


def test_sums_of_an_index_do_not_count(folder: Path) -> None:
    found = []
    for index in ({"weight_map": {"a": "b"}}, {"metadata": {"total_size": 8}, "weight_map": {"a": "b"}}, {"weight_map": {}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found.append(model_digest(folder, True, None))
    assert found[0] == found[1] != found[2]


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "more.safetensors").symlink_to(folder / "nothing")
    with pytest.raises(ModelFilesError, match=r"more\.safetensors cannot be read: No such file or directory"):
        fingerprints(folder, True)
