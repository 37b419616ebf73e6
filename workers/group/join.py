"""join: a rank meets the others of its generation and learns which shard of the model it has. Called by worker.py."""

from pathlib import Path

import torch

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.worker_config import WorkerConfig
from quire.workers.expert_load import expert_load_of
from quire.workers.group.emulated import EmulatedExchange
from quire.workers.group.group import Group
from quire.workers.group.place import Place
from quire.workers.group.store import ChannelStore
from quire.workers.models.config import ModelConfig
from quire.workers.parallel import Parallel
from quire.workers.stages import stage_of


def join(
    config: WorkerConfig, link: WorkerToCore, device: torch.device, model: ModelConfig, dtype: torch.dtype
) -> tuple[Group | None, Parallel]:
    """The group of ranks, None for a single rank. Raises ExchangeFailed, and ModelConfigError for more stages than layers."""
    engine = config.engine
    group, parallel = None, Parallel(device=device, expert_parallel=engine.enable_expert_parallel)
    if engine.world_size > 1:
        group, parallel = _meet(config, link, device, model, dtype)
    elif engine.emulate_world_size > 1:
        exchange = EmulatedExchange(engine.emulate_world_size)
        for_norms = exchange if model.model.norm.is_plain else None
        parallel = Parallel(
            0, engine.emulate_world_size, device, exchange, for_norms, expert_parallel=engine.enable_expert_parallel
        )
    parallel.expert_load = expert_load_of(model, parallel)
    return group, parallel


def _meet(
    config: WorkerConfig, link: WorkerToCore, device: torch.device, model: ModelConfig, dtype: torch.dtype
) -> tuple[Group, Parallel]:
    engine = config.engine
    place = Place(
        config.rank,
        engine.world_size,
        device,
        engine.collective_timeout_s,
        stages=engine.pipeline_parallel_size,
        interface=config.bound_to.name,
        interface_address=config.bound_to.address,
        stage_on_one_host=config.group_on_one_host,
        one_host=config.one_host,
    )
    checkpoint = None if engine.load_format == "dummy" else Path(config.model_dir)
    stage = stage_of(model, dtype, place.stage, place.stages, checkpoint)
    store, plain_norms = ChannelStore(link, config.rank), model.model.norm.is_plain
    group = Group(store, place, model.hidden_size, dtype, plain_norms=plain_norms)
    parallel = Parallel(
        place.within_stage.rank,
        place.within_stage.size,
        device,
        group.exchange,
        group.norm_exchange,
        stage,
        expert_parallel=engine.enable_expert_parallel,
    )
    return group, parallel
