"""Models told apart by their files: equal copies are one model, whatever else differs is another."""

import shutil
from pathlib import Path

import pytest

from quire.enginecore.loading.fingerprint import SAMPLE_BYTES, fingerprints, model_digest, size_of
from quire.enginecore.loading.model_files import ModelFilesError


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


def test_settings_overrides_and_files_count(folder: Path) -> None:
    digests = [model_digest(folder, True, None), model_digest(folder, False, None), model_digest(folder, True, {"a": 1})]
    (folder / "config.json").write_text("{ }")
    digests.append(model_digest(folder, True, None))
    (folder / "more.safetensors").write_bytes(b"")
    digests.append(model_digest(folder, True, None))
    assert len(set(digests)) == 5


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "more.safetensors").symlink_to(folder / "nothing")
    with pytest.raises(ModelFilesError, match=r"more\.safetensors cannot be read: No such file or directory"):
        fingerprints(folder, True)
