"""Adapters for tasks that a checkpoint holds beside its weights, served one beside the other: adapters/TASK of
jina-embeddings-v5, and those in the weights' file of jina-embeddings-v3.

With --enable-lora each is an adapter with the task's name, and a request chooses by its `task`. Without it, or with `jina_task`
in --hf-overrides, one task is merged into the weights while they load (workers/pooling/jina_v5.py, workers/models/encoders/
merged.py). The daemon calls it.
"""

import atexit
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.jina_v3_adapters import CONFIG, WEIGHTS, digest_of, read_adapters, write_adapters
from quire.enginecore.loading.model_files import read_json
from quire.ipc.adapters import problem_with_name
from quire.ipc.config import EngineConfig
from quire.ipc.encoders import BY_REQUEST, JINA_V5
from quire.ipc.lora_flags import parse_module

log = logging.getLogger("quire.enginecore")

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
    """The folder with the adapters of jina-embeddings-v3: in the user's cache under a digest of them, so that all engines and
    later starts have the same; where nothing can be written there, a temporary one, which goes when the engine ends."""
    rank, alpha = fields.get("lora_rank", 4), fields.get("lora_alpha", 1)
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise ModelFilesError("config.json: lora_rank and lora_alpha of a model with lora_adaptations must be numbers")
    if wrong := next((name for name in names if name in (".", "..") or "/" in name or problem_with_name(name)), None):
        raise ModelFilesError(f"config.json: lora_adaptations has {wrong!r:.80}, which is no name of a task")
    stacked, form = read_adapters(folder, names), (names, rank, float(alpha))
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "tasks"
        place = cache / digest_of(stacked, *form)
        if not _is_whole(place, names):
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(place, names):  # else another engine has made it meanwhile
                    _put(place, lambda made: write_adapters(stacked, made, *form))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        log.warning("the adapters of tasks go to a temporary folder, as the cache (XDG_CACHE_HOME) is refused: %s", error)
        place = Path(tempfile.mkdtemp(prefix="quire-tasks-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        write_adapters(stacked, place, *form)
    return place


def _is_whole(place: Path, names: list[str]) -> bool:
    """Whether no file is missing, or empty, as a crash of the host may leave it."""
    files = [place / name / file for name in names for file in (CONFIG, WEIGHTS)]
    return all(file.is_file() and file.stat().st_size for file in files)


def _put(place: Path, write: Callable[[Path], None]) -> None:
    """Make a folder with one rename, so that no reader sees half of it. Only one process may do so at a time."""
    made = place.with_suffix(".part")
    for left in (made, place):
        shutil.rmtree(left, ignore_errors=True)
    try:
        made.mkdir()
        write(made)
        made.rename(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)
