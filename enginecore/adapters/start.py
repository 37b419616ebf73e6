"""Adapters at an engine's start: the limits of its slots, and the adapters of --lora-modules. Called by the daemon.

Their folders are read before the workers start, as what they contain decides what a slot must hold. When the workers are ready,
each rank reads and checks its part, before any request can come.
"""

import os
import time
from typing import NamedTuple

import msgspec

from quire.enginecore.adapters.adapters import Adapters
from quire.enginecore.adapters.folders import Folders
from quire.enginecore.adapters.hub import Hub
from quire.enginecore.loading.task_adapters import Tasks
from quire.enginecore.stop_signals import EarlyStop
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.workers import WorkerGroup
from quire.ipc.adapters import AdapterError, AdapterInfo, AdapterLimits, AdapterPlan, with_layers_of
from quire.ipc.bundled import bundled
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import limits_of, parse_module

LOOK_S = 0.005
NO_TASKS = Tasks()
Plans = dict[str, AdapterPlan]


class AtStart(NamedTuple):
    """The adapters of --lora-modules, by name, where others are downloaded from, and the names of the base model."""

    plans: Plans
    hub: Hub
    base_names: tuple[str, ...]


def read_modules(config: EngineConfig, tasks: Tasks = NO_TASKS) -> tuple[AdapterLimits | None, AtStart]:
    """The limits of the engine's adapters, None if it serves none; and what is known of adapters before the workers start.
    tasks: the adapters of the model's own.

    Raises AdapterError, which names the adapter."""
    hub = Hub(tuple(config.lora_hub), config.download_dir, config.hf_token)
    names = *config.served_model_name, config.model or bundled(config.runner).name
    if not config.enable_lora:
        return None, AtStart({}, hub, names)
    limits = msgspec.structs.replace(limits_of(config), tasks=tasks.names, default_task=tasks.default)
    if missing := next((folder for folder in limits.dirs if not os.path.isdir(folder)), None):
        raise AdapterError(f"--lora-dirs: there is no folder {missing!r}")
    plans = _read(limits, hub, config.lora_modules) if config.lora_modules else {}
    return with_layers_of(limits, plans.values()), AtStart(plans, hub, names)


def _read(limits: AdapterLimits, hub: Hub, modules: list[str]) -> Plans:
    folders, plans = Folders(limits, lambda call: None, hub), Plans()
    try:
        for name, path in map(parse_module, modules):
            try:
                plans[name] = folders.read_now(path)
            except (AdapterError, OSError) as error:
                raise AdapterError(f"--lora-modules {name}: {error}") from None
    finally:
        folders.close()
    return plans


def register(adapters: Adapters | None, start: AtStart, workers: WorkerGroup, early: EarlyStop) -> list[AdapterInfo]:
    """Let the workers, which are ready, read the adapters, and wait for them; returns what frontends are told.

    Raises AdapterError, and Stopped if the process is told to stop."""
    if adapters is None:
        return []
    outcomes = adapters.begin_with(*start)
    while None in outcomes.values():
        time.sleep(LOOK_S)
        early.check()
        try:
            workers.messages()
            workers.check_alive()
        except WorkersFailed as error:
            raise AdapterError(f"--lora-modules: {error}") from error
    for name, problem in outcomes.items():
        if problem:
            raise AdapterError(f"--lora-modules {name}: {problem}")
    return [adapter.info for adapter in adapters.registry]
