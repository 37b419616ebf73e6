"""Makes a worker's adapter slots, if its engine serves adapters."""

import logging
from collections.abc import Callable

import torch

from quire.ipc.worker_config import WorkerConfig
from quire.workers.adapters.loads import AdapterLoads
from quire.workers.adapters.places import slots_bytes
from quire.workers.adapters.slots import AdapterSlots
from quire.workers.models.language_model import LanguageModel

log = logging.getLogger("quire.workers")


def planned_bytes(config: WorkerConfig, model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of all adapter slots of a model that has none yet."""
    return 0 if config.adapters is None else slots_bytes(model, config.adapters, dtype)


def make_adapters(
    config: WorkerConfig, model: LanguageModel, dtype: torch.dtype, device: torch.device, answer: Callable[[int, str], None]
) -> AdapterLoads | None:
    """The adapter slots of `model`, which has its weights; None: the engine serves no adapters. answer: see AdapterLoads."""
    if (limits := config.adapters) is None:
        return None
    engine = config.engine
    most = max(engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_samples)
    slots = AdapterSlots(model, limits, dtype, most, device)
    log.info("%d adapter slots of %.1f MB each", limits.max_loras, slots.slot_bytes / 1e6)
    return AdapterLoads(slots, answer)
