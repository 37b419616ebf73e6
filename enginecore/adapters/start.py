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
from quire.enginecore.stop_signals import EarlyStop
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.workers import WorkerGroup
from quire.ipc.adapters import AdapterError, AdapterInfo, AdapterLimits, AdapterPlan
from quire.ipc.bundled import bundled
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import CPU_LORAS, parse_module

LOOK_S = 0.005
Plans = dict[str, AdapterPlan]


class AtStart(NamedTuple):
    """The adapters of --lora-modules, by name, where others are downloaded from, and the names of the base model."""

    plans: Plans
    hub: Hub
    base_names: tuple[str, ...]


def read_modules(config: EngineConfig) -> tuple[AdapterLimits | None, AtStart]:
    """The limits of the engine's adapters, None if it serves none; and what is known of adapters before the workers start.

    Raises AdapterError, which names the adapter."""
    hub = Hub(tuple(config.lora_hub), config.download_dir, config.hf_token)
    names = *config.served_model_name, config.model or bundled(config.runner).name
    if not config.enable_lora:
        return None, AtStart({}, hub, names)
    limits = AdapterLimits(
        max_loras=config.max_loras,
        max_rank=config.max_lora_rank,
        max_cpu_loras=config.max_cpu_loras or CPU_LORAS * config.max_loras,
        target_modules=tuple(config.lora_target_modules),
        dtype="" if config.lora_dtype == "auto" else config.lora_dtype,
        dirs=tuple(os.path.abspath(folder) for folder in config.lora_dirs),
        captures=bool(config.lora_modules or config.lora_dirs or config.lora_hub),
        on_demand=config.lora_on_demand,
        has_hub=bool(config.lora_hub),
    )
    if missing := next((folder for folder in limits.dirs if not os.path.isdir(folder)), None):
        raise AdapterError(f"--lora-dirs: there is no folder {missing!r}")
    plans = _read(limits, hub, config.lora_modules) if config.lora_modules else {}
    return with_layers_of(limits, plans), AtStart(plans, hub, names)


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


def with_layers_of(limits: AdapterLimits, plans: Plans) -> AdapterLimits:
    """A slot also holds the head, the embedding, routers and experts where one of these adapters has them."""
    layers = {part.layer for plan in plans.values() for part in plan.parts}
    names = {layer.rpartition(".")[2] for layer in layers}
    return msgspec.structs.replace(
        limits,
        has_head="lm_head" in names,
        has_embedding=bool(names & {"embed_tokens", "wte", "word_embeddings"}),
        has_routers=bool(names & {"gate", "router"}),
        has_experts=any(".experts" in layer for layer in layers),
    )


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
