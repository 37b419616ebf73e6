"""A decoder's pooling as sentence-transformers writes it beside config.json: modules.json, the folder of its pooling, prompts.

Read are a Transformer, one Pooling of one mode, Dense layers and Normalize, in this order; all else is refused
by name.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.ipc.pooling import PoolingType
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.sentence_transformers import DenseStage, PoolingConfigError, read_dense

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_max_tokens": "MAX",
    "pooling_mode_weightedmean_tokens": "WEIGHTED_MEAN",
    "pooling_mode_mean_sqrt_len_tokens": "SQRT_MEAN",
}
_NAMES: dict[str, PoolingType] = {
    name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token"): kind for name, kind in _MODES.items()
} | {"mean_sqrt_len_tokens": "SQRT_MEAN"}


class Modules(NamedTuple):
    """The files' words; None and empty where they have none."""

    pooling_type: PoolingType | None = None
    dense: tuple[DenseStage, ...] = ()
    normalizes: bool = False
    prompts: dict[str, str] = {}  # noqa: RUF012  # never changed
    default_prompt_name: str | None = None
    similarity_fn_name: str = "cosine"


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
        if kind == "Pooling" and found.pooling_type is None:
            place = str(module.get("path", ""))
            if not place or Path(place).name != place:
                raise ModelConfigError(f"{MODULES}: a module's path must be a folder's name, not {place!r:.60}")
            found = found._replace(pooling_type=_pooling_type(_read(model_dir / place / "config.json") or {}, place))
        elif kind == "Dense" and found.pooling_type is not None and not found.normalizes:
            found = found._replace(dense=(*found.dense, _dense_layer(model_dir, str(module.get("path", "")))))
        elif kind == "Normalize" and found.pooling_type is not None:
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


def _pooling_type(fields: Any, place: str) -> PoolingType:
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{place}/config.json is not a JSON object")
    mode = fields.get("pooling_mode")
    by_flags = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    chosen = [str(mode)] if mode else by_flags
    known = _NAMES if mode else _MODES
    if len(chosen) != 1 or chosen[0] not in known:
        raise ModelConfigError(f"{place}/config.json: {' and '.join(chosen) or 'no pooling'} is not supported for decoders")
    if fields.get("include_prompt") is False:
        raise ModelConfigError(f"{place}/config.json: include_prompt: false is not supported for decoders")
    return known[chosen[0]]


def _dense_layer(model_dir: Path, place: str) -> DenseStage:
    if not place or Path(place).name != place:
        raise ModelConfigError(f"{MODULES}: a module's path must be a folder's name, not {place!r:.60}")
    try:
        return read_dense(_read(model_dir / place / "config.json") or {}, f"{place}/config.json", place, "text")
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None


def _prompts(fields: Any) -> Modules:
    prompts = fields.get("prompts") if isinstance(fields, dict) else None
    prompts = {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    default = fields.get("default_prompt_name") if isinstance(fields, dict) else None
    similarity = fields.get("similarity_fn_name") if isinstance(fields, dict) else None
    return Modules(
        prompts=prompts,
        default_prompt_name=default if isinstance(default, str) and default in prompts else None,
        similarity_fn_name=similarity if isinstance(similarity, str) else "cosine",
    )
