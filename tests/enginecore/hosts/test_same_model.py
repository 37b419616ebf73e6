"""Whether another host has the same model: found by the same name, compared by settings and samples of weights."""

import shutil
from pathlib import Path

import msgspec
import pytest

from quire.enginecore.hosts.same_model import find_same_model, model_files
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.config import EngineConfig
from quire.ipc.messages.hosts import ModelFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


def test_the_bundled_model_and_a_folder_are_found(folder: Path) -> None:
    assert find_same_model(model_files(EngineConfig(), BUNDLED)) == BUNDLED
    model = model_files(EngineConfig(model=str(folder)), folder)
    assert model.name == str(folder) and set(model.files) == {"config.json", "model.safetensors"}
    assert find_same_model(model) == folder


def change_weights(folder: Path) -> None:
    """As another model of this kind: nearly all bytes are others, the size is the same."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    half = len(data) // 2
    file.write_bytes(data[:half] + bytes(byte ^ 1 for byte in data[half:]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: (f / "config.json").write_text("{}"), "config.json has other contents than on the engine's host"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "model.safetensors has another size than"),
        (lambda f: change_weights(f), "model.safetensors has other contents than"),
        (lambda f: (f / "more.safetensors").write_bytes(b"x"), "more.safetensors is on one of the hosts only"),
        (lambda f: shutil.rmtree(f), "is not there: a model's folder must be at the same place on all hosts"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    ],
)
def test_what_differs_is_named(folder: Path, change, why: str) -> None:
    model = model_files(EngineConfig(model=str(folder)), folder)
    change(folder)
    with pytest.raises(ModelFilesError, match=why):
        find_same_model(model)


def test_a_second_copy_of_the_weights_is_none_of_the_model(folder: Path) -> None:
    model = model_files(EngineConfig(model=str(folder)), folder)
    (folder / "consolidated.safetensors").write_bytes(b"x")
    assert find_same_model(model) == folder


def test_dummy_weights_need_no_files(folder: Path) -> None:
    model = model_files(EngineConfig(model=str(folder), load_format="dummy"), folder)
    (folder / "model.safetensors").unlink()
    assert set(model.files) == {"config.json"} and find_same_model(model) == folder


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused() -> None:
    model = ModelFiles("../../no/such/folder", None, None, True, {})
    with pytest.raises(ModelFilesError, match="neither a folder nor a hub id"):
        find_same_model(model)
    assert msgspec.structs.asdict(model)["files"] == {}
