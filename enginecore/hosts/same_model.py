"""Whether two hosts have the same model, by what loading/fingerprint.py says of its files.

The core says what it has (`model_files`); an agent finds the model on its own host by the same name (`find_same_model`) and
names the first file that differs.
"""

from pathlib import Path

from quire.enginecore.loading.fingerprint import fingerprints, size_of
from quire.enginecore.loading.model_files import BUNDLED, ModelFilesError, resolve_model
from quire.ipc.config import EngineConfig
from quire.ipc.messages.hosts import ModelFiles


def model_files(config: EngineConfig, folder: Path) -> ModelFiles:
    """What the engine's model is, for other hosts. folder: where it was found here. Raises ModelFilesError."""
    with_weights = config.load_format != "dummy"
    name = config.model
    if name is not None and Path(name).expanduser().is_dir():
        name = str(folder)  # there is no working directory that both sides share
    files = fingerprints(folder, with_weights)
    return ModelFiles(name, config.revision, config.download_dir, with_weights, files)


def find_same_model(model: ModelFiles) -> Path:
    """The folder of this model on this host, downloaded from the hub if need be. Raises ModelFilesError."""
    if model.name is None:
        folder = BUNDLED
    elif model.name.startswith("/") and not Path(model.name).is_dir():
        raise ModelFilesError(f"{model.name} is not there: a model's folder must be at the same place on all hosts")
    else:
        folder = resolve_model(model.name, model.revision, model.download_dir, model.with_weights)
    have = fingerprints(folder, model.with_weights)
    for name in sorted(have.keys() ^ model.files.keys()):  # first, for more files are sampled less
        raise ModelFilesError(f"another model is in {folder}: {name} is on one of the hosts only")
    for name in sorted(have):
        if have[name] != model.files[name]:
            is_larger = name.endswith(".safetensors") and size_of(have[name]) != size_of(model.files[name])
            what = "another size" if is_larger else "other contents"
            raise ModelFilesError(f"another model is in {folder}: {name} has {what} than on the engine's host")
    return folder
