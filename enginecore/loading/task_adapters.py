"""Adapters for tasks that a checkpoint holds beside its weights, served one beside the other: adapters/TASK of
jina-embeddings-v5.

With --enable-lora each is an adapter with the task's name, and a request chooses by its `task`. Without it, or with `jina_task`
in --hf-overrides, one task is merged into the weights while they load (workers/pooling/jina_v5.py). The daemon calls it.
"""

import json
from pathlib import Path

import msgspec

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import read_json
from quire.ipc.config import EngineConfig
from quire.ipc.encoders import BY_REQUEST, JINA_V5
from quire.ipc.lora_flags import parse_module

DEFAULT_TASK = "retrieval"


def with_task_adapters(config: EngineConfig, folder: Path) -> tuple[EngineConfig, tuple[str, ...]]:
    """(the config that serves the adapters of the checkpoint's tasks, these tasks, the default one first); any other model's
    config as it is, and none. Raises ModelFilesError."""
    fields = {**read_json(folder / "config.json"), **config.hf_overrides}
    if not config.enable_lora or fields.get("architectures") != [JINA_V5] or fields.get("jina_task") is not None:
        return config, ()
    given = fields.get("task_names")
    tasks = sorted(map(str, given) if isinstance(given, list) else [], key=lambda task: task != DEFAULT_TASK)
    taken = {parse_module(text).name for text in config.lora_modules}
    if both := next((task for task in tasks if task in taken), None):
        raise ModelFilesError(f"--lora-modules: the name {both!r} is that of one of the model's tasks")
    modules = [json.dumps({"name": task, "path": str(folder / "adapters" / task)}) for task in tasks]
    more = {"hf_overrides": {**config.hf_overrides, "jina_task": BY_REQUEST}, "lora_modules": [*config.lora_modules, *modules]}
    return msgspec.structs.replace(config, **more), tuple(tasks)
