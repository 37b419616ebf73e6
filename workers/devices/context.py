"""The context of a worker's device: its sizes, by the engine's configuration, and what was made for the model."""

import torch

from quire.ipc.step.sections import StepLimits, max_device_words
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.kernels.step.tables import LogitsProcessorPool
from quire.workers.adapters.lora import StepAdapters
from quire.workers.attention.kv_cache import KVCache
from quire.workers.devices.device import DeviceContext
from quire.workers.models.config import ModelConfig
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import StateCache
from quire.workers.speculation.loaded import DraftModel


def context_of(
    engine: ResolvedEngineConfig,
    config: ModelConfig,
    cache: KVCache,
    states: StateCache,
    dtype: torch.dtype,
    parallel: Parallel,
    draft_model: DraftModel | None,
    adapters: StepAdapters | None = None,
) -> DeviceContext:
    """cache and states need not have memory yet."""
    rows, device = engine.max_num_seqs, parallel.device
    max_blocks = -(-engine.max_model_len // engine.block_size)
    sampled_rows = (rows if config.samples else 1) if parallel.stage.is_last else 0  # 1: kernels are given a table
    sizes = rows, engine.max_num_batched_tokens, engine.block_size, len(cache.groups), max_blocks
    return DeviceContext(
        config=config,
        cache=cache,
        pool=LogitsProcessorPool.allocate(sampled_rows, config.vocab_size, engine.max_model_len, device),
        max_model_len=engine.max_model_len,
        device=device,
        dtype=dtype,
        max_tokens=max(engine.max_num_batched_tokens, rows),
        max_rows=rows,
        max_blocks=max_blocks,
        max_device_words=max_device_words(StepLimits(*sizes, engine.max_samples, config.media is not None)),
        parallel=parallel,
        states=states,
        max_samples=engine.max_samples,
        speculation=engine.speculative_config,
        draft_model=draft_model,
        adapters=adapters,
    )
