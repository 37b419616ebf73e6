"""The files of a model that pools beside its config.json and safetensors: modules' folders, and weights of torch.save.

Called by model_files.py, which downloads subfolders and such weights for no other models.
"""

import json
from pathlib import Path
from typing import Any

from quire.ipc.encoders import JINA_V5, is_encoder

TORCH_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LENGTHS = "sentence_bert_config.json"


def has_torch_weights(folder: Path) -> bool:
    """Whether the folder is an encoder's, with weights of torch.save, which are read without unpickling them."""
    return any((folder / name).is_file() for name in TORCH_WEIGHTS) and is_encoder(_object(folder / "config.json"))


def more_patterns(folder: Path, has_safetensors: bool) -> list[str]:
    """Patterns of further files to download; the small files of the repository are in the folder."""
    patterns = []
    if is_encoder(_object(folder / "config.json")) and not has_safetensors:
        patterns += [*TORCH_WEIGHTS, "pytorch_model-*.bin"]
    if is_encoder(_object(folder / "config.json")):
        patterns += ["sparse_linear.pt", "colbert_linear.pt", "artifact.metadata"]  # of BGE-M3, and of ColBERT's own code
    if JINA_V5 in (_object(folder / "config.json").get("architectures") or ()):
        patterns += ["adapters/*/adapter_config.json", "adapters/*/adapter_model.safetensors"]
    for name in module_folders(folder):
        patterns += [f"{name}/{file}" for file in ("config.json", "model.safetensors", "pytorch_model.bin")]
    return patterns


def module_folders(folder: Path) -> list[str]:
    """The folders that modules.json names, as far as they are plain names."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [path for path in paths if isinstance(path, str) and path and Path(path).name == path and path != ".."]


def max_seq_length(folder: Path) -> int | None:
    """Most tokens of a text, as sentence-transformers' file beside modules.json says it, or beside an encoder; None if there
    is none."""
    value = _object(folder / LENGTHS).get("max_seq_length")
    return value if type(value) is int and value > 0 else None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
