"""A decoder's pooling as sentence-transformers writes it beside config.json: modules.json, the folder of its pooling, prompts.

Read are a Transformer, one Pooling, Dense layers and Normalize, in this order; all else is refused by name.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.ipc.pooling import PoolingType
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.sentence_transformers import (
    SIMILARITIES,
    DenseStage,
    Mode,
    PoolingConfigError,
    read_dense,
    read_pooling,
)

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TYPES: dict[Mode, PoolingType] = {
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
    "max": "MAX",
    "weightedmean": "WEIGHTED_MEAN",
    "mean_sqrt_len_tokens": "SQRT_MEAN",
}


class Modules(NamedTuple):
    """The files' words; None and empty where they have none."""

    poolings: tuple[PoolingType, ...] = ()  # several stand side by side
    include_prompt: bool = True
    dense: tuple[DenseStage, ...] = ()
    normalizes: bool = False
    prompts: dict[str, str] = {}  # noqa: RUF012  # never changed
    default_prompt_name: str | None = None
    similarity_fn_name: str = "cosine"
    truncate_dim: int = 0  # elements to which vectors are cut; 0: none is


def read_modules(model_dir: Path) -> Modules | None:
    """None if the folder has no modules.json. Raises ModelConfigError."""
    listed = _read(model_dir / MODULES)
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
        raise ModelConfigError(f"{MODULES} must hold a list of modules")
    found = _prompts(_read(model_dir / SETTINGS) or {})
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling" and not found.poolings:
            place = _place(module)
            try:
                stage = read_pooling(_fields(model_dir, place), f"{place}/config.json")
            except PoolingConfigError as error:
                raise ModelConfigError(str(error)) from None
            found = found._replace(poolings=tuple(TYPES[mode] for mode in stage.modes), include_prompt=stage.include_prompt)
        elif kind == "Dense" and found.poolings and not found.normalizes:
            found = found._replace(dense=(*found.dense, _dense_layer(model_dir, _place(module))))
        elif kind == "Normalize" and found.poolings:
            found = found._replace(normalizes=True)
        elif kind != "Transformer":
            raise ModelConfigError(f"{MODULES}: the module {kind or module!r:.60} is not supported for decoders")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None


def _place(module: dict[str, Any]) -> str:
    place = str(module.get("path", ""))
    if not place or Path(place).name != place:
        raise ModelConfigError(f"{MODULES}: a module's path must be a folder's name, not {place!r:.60}")
    return place


def _fields(model_dir: Path, place: str) -> dict[str, Any]:
    found = _read(model_dir / place / "config.json") or {}
    if not isinstance(found, dict):
        raise ModelConfigError(f"{place}/config.json is not a JSON object")
    return found


def _dense_layer(model_dir: Path, place: str) -> DenseStage:
    try:
        return read_dense(_fields(model_dir, place), f"{place}/config.json", place, "text")
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None


def _prompts(fields: Any) -> Modules:
    fields = fields if isinstance(fields, dict) else {}
    prompts, default, cut = (fields.get(name) for name in ("prompts", "default_prompt_name", "truncate_dim"))
    prompts = {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    similarity = str(fields.get("similarity_fn_name") or "cosine").lower()
    if cut is not None and (type(cut) is not int or cut < 1):
        raise ModelConfigError(f"{SETTINGS}: truncate_dim must be a positive integer, not {cut!r:.40}")
    if similarity not in SIMILARITIES:
        raise ModelConfigError(f"{SETTINGS}: similarity_fn_name {similarity!r:.40} is not supported")
    return Modules(
        prompts=prompts,
        default_prompt_name=default if isinstance(default, str) and default in prompts else None,
        similarity_fn_name=similarity,
        truncate_dim=cut or 0,
    )
