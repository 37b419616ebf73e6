"""Names that users give for a model: hub addresses are taken, and a name that cannot be served gets a line that helps.

Called by model_files.py, before a download and for folders that lack what a model has.
"""

import json
import re
from pathlib import Path
from typing import Any

from quire.ipc.hub_names import SAFETENSORS, hub_id_of


def served_name(model: str) -> str:
    """The name under which a model is served by default: as it was given, an address of the hub's without the hub."""
    return model if Path(model).expanduser().is_dir() else hub_id_of(model)


def what_file_is(path: Path) -> str:
    """The sentence for a file in place of a folder."""
    if is_gguf(path):
        return f"{path} is a GGUF file, which is not read: {SAFETENSORS}. Give the folder that the file was made from"
    return f"{path} is a file; give the model's folder"


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" or path.suffix == ".gguf"
    except OSError:
        return path.suffix == ".gguf"


def what_folder_is(name: str, folder: Path) -> str | None:
    """The sentence for a folder of something else than a model; None if nothing is known of it."""
    if (folder / "adapter_config.json").is_file():
        base = _object(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {base!s:.100}" if base else ""
        return (
            f"{name} is a LoRA adapter{of}, not a model: adapters are not served. Merge it into its model (peft's "
            "merge_and_unload), save the result, and give that folder"
        )
    if any(folder.glob("*.gguf")) or re.search(r"[-_.]gguf\b", name, re.IGNORECASE):
        return f"{name} has GGUF files, which are not read: {SAFETENSORS}. Give the repository that they were made from"
    if (folder / "params.json").is_file():
        return (
            f"{name} is in Mistral's own format (params.json, consolidated.safetensors), which is not read: {SAFETENSORS}. "
            "Mistral's repositories mostly have both forms, or there is one with config.json"
        )
    if (folder / "model_index.json").is_file():
        return f"{name} is a pipeline of diffusers, which makes images: only language models are served"
    if (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        return f"{name} is a model of sentence-transformers: only language models are served"
    return None


def no_vocabulary(config: dict[str, Any]) -> str | None:
    """The sentence for a config.json without a vocabulary: a model of images or sounds; None for others."""
    if config.get("vocab_size") is not None:
        return None
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else str(config.get("model_type"))
    sizes = ("image_size", "patch_size", "num_channels", "vision_config", "num_mel_bins", "conv_dim", "projection_dim")
    if not any(name in config for name in sizes):
        return None
    return (
        f"{architecture:.80} is a model of images or sounds without a language model: it generates no text, and is not served"
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
