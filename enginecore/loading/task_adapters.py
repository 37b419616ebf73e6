"""Adapters for tasks that a checkpoint holds beside its weights, served one beside the other: adapters/TASK of
jina-embeddings-v5, and those in the weights' file of jina-embeddings-v3.

With --enable-lora each is an adapter with the task's name, and a request chooses by its `task`. Without it, or with `jina_task`
in --hf-overrides, one task is merged into the weights while they load (workers/pooling/jina_v5.py, workers/models/encoders/
merged.py). The daemon calls it.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.jina_v3_adapters import write_adapters
from quire.enginecore.loading.model_files import read_json
from quire.ipc.adapters import problem_with_name
from quire.ipc.config import EngineConfig
from quire.ipc.encoders import BY_REQUEST, JINA_V5
from quire.ipc.lora_flags import parse_module

DEFAULT_TASK = "retrieval"  # of jina-embeddings-v5
JINA_V3 = ("XLMRobertaModel", "JinaEmbeddingsV3Model")


class Tasks(NamedTuple):
    """The names of a checkpoint's tasks that are served as adapters. default: of requests that name none; empty: the model."""

    names: tuple[str, ...] = ()
    default: str = ""


def with_task_adapters(config: EngineConfig, folder: Path) -> tuple[EngineConfig, Tasks]:
    """(the config that serves the adapters of the checkpoint's tasks, these tasks); any other model's config as it is, and
    none. Raises ModelFilesError."""
    fields = {**read_json(folder / "config.json"), **config.hf_overrides}
    if not config.enable_lora or fields.get("jina_task") is not None:
        return config, Tasks()
    if fields.get("architectures") == [JINA_V5]:
        names = sorted(_names(fields.get("task_names")), key=lambda task: task != DEFAULT_TASK)
        tasks, place = Tasks(tuple(names), names[0] if names else ""), folder / "adapters"
        overrides = {**config.hf_overrides, "jina_task": BY_REQUEST}
    elif fields.get("architectures") in [[name] for name in JINA_V3] and (names := _names(fields.get("lora_adaptations"))):
        tasks, place, overrides = Tasks(tuple(names)), _written(folder, fields, names), config.hf_overrides
    else:
        return config, Tasks()
    taken = {parse_module(text).name for text in config.lora_modules}
    if both := next((task for task in tasks.names if task in taken), None):
        raise ModelFilesError(f"--lora-modules: the name {both!r} is that of one of the model's tasks")
    modules = [json.dumps({"name": task, "path": str(place / task)}) for task in tasks.names]
    more = {"hf_overrides": overrides, "lora_modules": [*config.lora_modules, *modules]}
    return msgspec.structs.replace(config, **more), tasks


def _names(given: object) -> list[str]:
    return list(map(str, given)) if isinstance(given, list) else []


def _written(folder: Path, fields: Mapping[str, Any], names: list[str]) -> Path:
    """The folder with the adapters of jina-embeddings-v3; it goes when the engine ends."""
    rank, alpha = fields.get("lora_rank", 4), fields.get("lora_alpha", 1)
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise ModelFilesError("config.json: lora_rank and lora_alpha of a model with lora_adaptations must be numbers")
    if wrong := next((name for name in names if name in (".", "..") or "/" in name or problem_with_name(name)), None):
        raise ModelFilesError(f"config.json: lora_adaptations has {wrong!r:.80}, which is no name of a task")
    place = Path(tempfile.mkdtemp(prefix="quire-tasks-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    write_adapters(folder, place, names, rank, float(alpha))
    return place
