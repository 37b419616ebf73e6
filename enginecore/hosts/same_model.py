"""Checks whether two hosts have the same model, by the fingerprints of its files (loading/fingerprint.py).

The core describes its model (`model_files`); an agent finds the model of the same name on its own host (`find_same_model`), and
names the first file that differs.
"""

from pathlib import Path

from quire.enginecore.loading.fingerprint import fingerprints, size_of
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import resolve_model
from quire.ipc.bundled import CHAT_MODEL
from quire.ipc.config import EngineConfig
from quire.ipc.messages.hosts import ModelFiles


def model_files(config: EngineConfig, folder: Path) -> ModelFiles:
    """A description of the engine's model for other hosts. folder: where it is on this host. Raises ModelFilesError."""
    with_weights = config.load_format != "dummy"
    name = config.model
    if folder != CHAT_MODEL.folder and (name is None or Path(name).expanduser().is_dir()):
        name = str(folder)  # absolute: the two sides share no working directory
    files = fingerprints(folder, with_weights)
    return ModelFiles(name, config.revision, config.download_dir, with_weights, files)


def find_same_model(model: ModelFiles) -> Path:
    """The folder of this model on this host, downloaded from the hub if need be. Raises ModelFilesError."""
    if model.name is None:
        folder = CHAT_MODEL.folder
    elif model.name.startswith("/") and not Path(model.name).is_dir():
        raise ModelFilesError(f"{model.name} is not there: a model's folder must be at the same place on all hosts")
    else:
        folder = resolve_model(model.name, model.revision, model.download_dir, model.with_weights)
    have = fingerprints(folder, model.with_weights)
    for name in sorted(have.keys() ^ model.files.keys()):  # checked first: with another number of files all samples differ
        raise ModelFilesError(f"another model is in {folder}: {name} is on one of the hosts only")
    for name in sorted(have):
        if have[name] != model.files[name]:
            is_larger = name.endswith(".safetensors") and size_of(have[name]) != size_of(model.files[name])
            what = "another size" if is_larger else "other contents"
            raise ModelFilesError(f"another model is in {folder}: {name} has {what} than on the engine's host")
    return folder
