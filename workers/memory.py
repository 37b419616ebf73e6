"""How many KV blocks fit: the memory of the weights and of the largest step is measured; the KV cache gets the rest."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.ipc import memory_plan
from quire.ipc.memory_plan import GIB, GRAPHS_BYTES, LayerSizes, ModelSizes
from quire.ipc.step.plan import DTYPES, StepPlan, default_slots
from quire.ipc.step.sections import PREFILL_SAMPLE, SAMPLING_RANDOM
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.graph_sizes import most_tokens
from quire.workers.models.config import ModelConfig
from quire.workers.parallel import Parallel

MIN_BLOCKS = 2


class OutOfMemory(Exception):
    """The model does not fit; the text says how to make it fit."""


@dataclass(frozen=True)
class Budget:
    num_blocks: int
    activation_bytes: int


def largest_plan(max_tokens: int, max_rows: int, max_model_len: int) -> StepPlan:
    """A step of max_tokens prefill tokens in as few rows as possible, all in the null block: for measuring and warming up."""
    longest = max(max_model_len - 1, 1)
    lengths = [longest] * (max_tokens // longest) + [max_tokens % longest]
    lengths = [n for n in lengths if n][:max_rows]
    rows = np.zeros(len(lengths), DTYPES["prefill_rows"])
    slots = default_slots(len(lengths))
    slots["slot"] = rows["slot"] = np.arange(len(lengths))
    slots["temperature"] = 1.0
    rows["length"], rows["flags"] = lengths, PREFILL_SAMPLE
    tokens = np.zeros(sum(lengths), np.int32)
    return StepPlan(
        step=0,  # not a step of the core: its results in the ring are ignored
        sections={"slot_updates": slots, "prefill_rows": rows, "prefill_tokens": tokens},
        sampling_kind=SAMPLING_RANDOM,
        max_seq_len=max(lengths),
    )


def cpu_step_bytes(
    model: ModelConfig, max_tokens: int, max_rows: int, dtype: torch.dtype, parallel: Parallel | None = None
) -> int:
    """The most memory that a step takes on a CPU besides weights and KV cache: activations, logits, oneDNN's compiled code.

    It is computed, not measured as on a GPU: running the largest step of a 0.5B model would add a second to every start.
    """
    return memory_plan.cpu_step_bytes(sizes_of(model, parallel), max_tokens, max_rows, dtype.itemsize)


def sizes_of(model: ModelConfig, parallel: Parallel | None = None) -> ModelSizes:
    """The sizes of a model, or of this rank's shard of it, that the memory formulas need."""
    ranks = parallel or Parallel()
    specs = [(layer.attention.on_rank(ranks), layer.mlp_width(model.hidden_size, ranks)) for layer in model.layers]
    layers = tuple(
        LayerSizes(
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            s.window,
            mlp,
            1 if s.cache_dtype else 0,
            has_cache=s.shares is None,
            has_values=not s.latent_dim,
        )
        for s, mlp in specs
    )
    layer_inputs = 0 if model.model.per_layer is None else len(layers) * model.model.per_layer.size
    return ModelSizes(model.vocab_size, model.hidden_size, layers, layer_inputs)


def cpu_budget(config: ResolvedEngineConfig, cache: KVCache, activation_bytes: int) -> Budget:
    """The blocks in --cpu-kv-cache-gib, but no more than max_num_seqs requests of the largest length can use."""
    if (asked := asked_for(config, cache)) is not None:
        return Budget(asked, activation_bytes)
    blocks = int(config.cpu_kv_cache_gib * GIB) // cache.block_bytes
    if blocks < MIN_BLOCKS:
        raise OutOfMemory(
            f"--cpu-kv-cache-gib {config.cpu_kv_cache_gib:g} has no room for two blocks of {cache.block_bytes} bytes: raise it"
        )
    most = memory_plan.most_useful_blocks(len(cache.groups), config.max_num_seqs, config.max_model_len, cache.block_size)
    return Budget(min(blocks, most), activation_bytes)


def graphs_bytes(config: ResolvedEngineConfig, weights_bytes: int, activation_bytes: int, logits_bytes: int) -> int:
    """Memory of the captured graphs: their logits, and as much again as the largest captured step takes to run."""
    most = config.max_num_batched_tokens
    captured = min(most_tokens(weights_bytes), most)
    return 0 if config.enforce_eager else memory_plan.graphs_bytes(captured, most, activation_bytes, logits_bytes)


def asked_for(config: ResolvedEngineConfig, cache: KVCache) -> int | None:
    """KV blocks that flags ask for, whatever memory is left; None without such flags. Raises OutOfMemory for too few to run."""
    blocks = config.requested_blocks(cache.block_bytes)
    if config.num_gpu_blocks_override is None and blocks is not None and blocks < MIN_BLOCKS:
        raise OutOfMemory(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} has no room for two blocks of {cache.block_bytes} bytes"
        )
    return blocks


def gpu_budget(
    config: ResolvedEngineConfig, cache: KVCache, weights_bytes: int, activation_bytes: int, graphs_bytes: int
) -> Budget:
    """The share of the GPU that --gpu-memory-utilization allows, minus the memory in use and that of steps and graphs.

    Call after the model was loaded and the largest step was run. Raises OutOfMemory; its text lists the measured sizes.
    """
    graphs_bytes += GRAPHS_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    allowed = int(config.gpu_memory_utilization * total)
    in_use = total - free
    room = allowed - in_use - activation_bytes - graphs_bytes
    if (asked := asked_for(config, cache)) is not None:
        return Budget(asked, activation_bytes)
    blocks = room // cache.block_bytes
    if blocks < MIN_BLOCKS:
        raise OutOfMemory(
            f"no memory is left for the KV cache: the GPU has {total / GIB:.1f} GiB, --gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} allows {allowed / GIB:.1f}; weights take {weights_bytes / GIB:.1f}, a step "
            f"{activation_bytes / GIB:.1f}, graphs {graphs_bytes / GIB:.1f}, everything in use {in_use / GIB:.1f}. "
            "Raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"
        )
    return Budget(blocks, activation_bytes)
