"""The line about memory at the start: what weights, steps and the KV cache take. Called by daemon.py."""

import logging

from quire.ipc.memory_plan import GIB, MIB, cached_tokens
from quire.ipc.messages.workers import WorkerProfile
from quire.ipc.worker_config import ResolvedEngineConfig

log = logging.getLogger("quire.enginecore")


def log_sizes(engine: ResolvedEngineConfig, profile: WorkerProfile, capacity: int) -> None:
    if profile.pooling is not None and profile.pooling.is_whole:
        sizes = profile.weights_bytes / GIB, profile.activation_bytes / GIB, engine.max_num_batched_tokens, engine.max_model_len
        text = "%s: weights %.2f GiB, activations %.2f GiB of a step of %d tokens; a text has at most %d"
        return log.info(text, profile.device, *sizes)
    tokens = cached_tokens(profile.num_blocks, engine.block_size, len(profile.kv_groups))
    log.info(
        "%s: weights %.2f GiB, activations %.2f GiB, KV cache %.2f GiB for %d tokens: %.1f requests of %d tokens",
        profile.device,
        profile.weights_bytes / GIB,
        profile.activation_bytes / GIB,
        profile.num_blocks * profile.block_bytes / GIB,
        tokens,
        tokens / engine.max_model_len,
        engine.max_model_len,
    )
    if profile.num_states:
        size = profile.num_states * profile.state_bytes / GIB
        log.info("recurrent states %.2f GiB: %d of %.1f MiB", size, profile.num_states, profile.state_bytes / MIB)
    if capacity < engine.max_model_len:
        log.warning(
            "the KV cache holds %d tokens, less than the model's %d: requests beyond are refused "
            "(--gpu-memory-utilization, --cpu-kv-cache-gib or a smaller --max-model-len change that)",
            capacity,
            engine.max_model_len,
        )
