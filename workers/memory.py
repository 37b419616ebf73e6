"""How many KV blocks fit: the memory of the weights and of the largest step is measured; the KV cache gets the rest."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from quire.ipc import memory_plan
from quire.ipc.cpu_memory import CpuNeeds, default_kv_bytes, refusal, room_for_kv
from quire.ipc.memory_plan import GIB, GRAPHS_BYTES, LayerSizes, ModelSizes
from quire.ipc.pooling import PoolingInfo, PoolRow
from quire.ipc.step.plan import DTYPES, StepPlan, default_slots
from quire.ipc.step.sections import PREFILL_POOL, PREFILL_POOL_END, PREFILL_SAMPLE, SAMPLING_RANDOM
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.graph_sizes import most_tokens
from quire.workers.layers.formats.packed_cpu import SMALL_BYTES
from quire.workers.layers.linear import Linear
from quire.workers.models.config import ModelConfig, StateTensor
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import state_cache_of
from quire.workers.speculation.loaded import DraftModel


class OutOfMemory(Exception):
    """The model does not fit; the text says how to make it fit."""


@dataclass(frozen=True)
class Budget:
    num_blocks: int
    activation_bytes: int
    num_states: int = 0  # with the dummy; 0: the model has none


@dataclass(frozen=True)
class StateNeeds:
    """Recurrent states that a rank wants: bytes of one, 0 in a stage without recurrent layers; and how many are useful."""

    state_bytes: int = 0
    wanted: int = 0
    is_asked: bool = False  # by a flag: it counts, whatever memory is left

    def divide(self, room: int, block_bytes: int) -> tuple[int, int]:
        """The number of states in `room` bytes, and the bytes that are left for KV blocks."""
        count = self.wanted
        if not self.is_asked:
            count = memory_plan.states_in(max(room, 0), block_bytes, self.state_bytes, self.wanted)
        return count, room - count * self.state_bytes


NO_STATE_NEEDS = StateNeeds()


def state_needs(config: ResolvedEngineConfig, model: ModelConfig, state_bytes: int) -> StateNeeds:
    """state_bytes: of one state in this stage. --num-states, if given, is what is wanted, whatever memory is left."""
    if all(layer.recurrent is None for layer in model.layers):
        return NO_STATE_NEEDS
    useful = memory_plan.useful_states(config.max_num_seqs, config.enable_prefix_caching)
    return StateNeeds(state_bytes, config.num_states or useful, config.num_states is not None)


def largest_plan(config: ResolvedEngineConfig, pooling: PoolingInfo | None = None, *, has_adapters: bool = False) -> StepPlan:
    """A step of as many prefill tokens as one may have, in as few rows as possible, all in the null block: for measuring and
    warming up. Its rows sample and, if the model pools, have a result by the last of its tasks: one for each token, mostly."""
    max_tokens, max_rows, longest = config.max_num_batched_tokens, config.max_num_seqs, max(config.max_model_len - 1, 1)
    lengths = [longest] * (max_tokens // longest) + [max_tokens % longest]
    lengths = [n for n in lengths if n][:max_rows]
    rows = np.zeros(len(lengths), DTYPES["prefill_rows"])
    slots = default_slots(len(lengths))
    slots["slot"] = rows["slot"] = np.arange(len(lengths))
    slots["temperature"] = 1.0
    rows["length"], rows["flags"] = lengths, PREFILL_SAMPLE
    if pooling is not None:
        rows["flags"] |= PREFILL_POOL | PREFILL_POOL_END
        rows["num_prompt_logprobs"] = PoolRow(pooling.tasks[-1], 0, use_activation=True).word()
    tokens = np.zeros(sum(lengths), np.int32)
    return StepPlan(
        step=0,  # not a step of the core: its results in the ring are ignored
        sections={"slot_updates": slots, "prefill_rows": rows, "prefill_tokens": tokens},
        sampling_kind=SAMPLING_RANDOM,
        max_seq_len=max(lengths),
        has_adapters=has_adapters,
        draft_depth=2,  # of a draft model, if there is one: a pass over the tokens, and one for each further draft
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
    states, kept = model.state_tensors(ranks), model.kept_sizes(ranks)
    layers = tuple(
        LayerSizes(
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            s.window,
            mlp,
            1 if s.cache_dtype else 0,
            has_cache=s.has_cache,
            has_values=not s.latent_dim,
            recurrent_elements=_elements(states.get(i, ()), is_recurrent=True),
            convolution_elements=_elements(states.get(i, ()), is_recurrent=False),
            kept_elements=sum(kept.get(i, ())),
        )
        for i, (s, mlp) in enumerate(specs)
    )
    layer_inputs = 0 if model.model.per_layer is None else len(layers) * model.model.per_layer.size
    return ModelSizes(model.vocab_size, model.hidden_size, layers, layer_inputs, model.state_dtype or "float32")


def _elements(tensors: Iterable[StateTensor], *, is_recurrent: bool) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_recurrent == is_recurrent)


def cpu_budget(
    config: ResolvedEngineConfig,
    cache: KVCache,
    weights_bytes: int,
    activation_bytes: int,
    states: StateNeeds = NO_STATE_NEEDS,
    *,
    is_packed: bool = False,
    vocab_size: int = 0,
) -> Budget:
    """The blocks that a flag asks for, or those in half of what is left, but no more than max_num_seqs requests of the largest
    length can use. It loads nothing and measures nothing, so it can be called first. Raises OutOfMemory for what does not fit.
    """
    ranks, engines = config.host_ranks or config.world_size, config.data_parallel_size
    itemsize, frontends = cache.dtype.itemsize, config.frontends
    needs = CpuNeeds(weights_bytes, activation_bytes, ranks, engines, itemsize, is_packed, frontends, vocab_size)
    available = config.host_memory_bytes
    room = None if available is None else room_for_kv(available, needs)
    blocks, num_states = _cpu_cache(config, cache, room, states)
    num_bytes = blocks * cache.block_bytes + num_states * states.state_bytes
    why = None if available is None else refusal(available, needs, num_bytes, config.host_memory_limit)
    if why is not None:
        raise OutOfMemory(why)
    return Budget(blocks, activation_bytes, num_states)


def _cpu_cache(config: ResolvedEngineConfig, cache: KVCache, room: int | None, states: StateNeeds) -> tuple[int, int]:
    """KV blocks, and recurrent states."""
    asked_bytes = None if config.cpu_kv_cache_gib is None else int(config.cpu_kv_cache_gib * GIB)
    copies = (config.host_ranks or config.world_size) * config.data_parallel_size
    num_bytes = default_kv_bytes(room, copies) if asked_bytes is None else asked_bytes
    if (asked := asked_for(config, cache, num_bytes, states)) is not None:
        return asked
    num_states, num_bytes = states.divide(num_bytes, cache.block_bytes)
    least = memory_plan.least_blocks(cache.block_bytes)
    most = memory_plan.most_useful_blocks(len(cache.groups), config.max_num_seqs, config.max_model_len, cache.block_size)
    blocks = memory_plan.blocks_in(num_bytes, cache.block_bytes)
    if config.cpu_kv_cache_gib is None:
        blocks = max(blocks, least)
    elif blocks < least:
        raise OutOfMemory(
            f"--cpu-kv-cache-gib {config.cpu_kv_cache_gib:g} has no room for two blocks of {cache.block_bytes} bytes: raise it"
        )
    return min(blocks, most), num_states


def budget_before_loading(
    config: ResolvedEngineConfig,
    model: ModelConfig,
    weights: LanguageModel,
    dtype: torch.dtype,
    parallel: Parallel,
    draft: DraftModel | None = None,
    adapters_bytes: int = 0,
) -> Budget:
    """The budget on a CPU, when the models are built and no weights are read. Raises OutOfMemory if it does not fit.

    adapters_bytes: of all adapter slots."""
    cache = KVCache(model.attention_specs(parallel), config.block_size, dtype)
    tokens, rows = max(config.max_num_batched_tokens, config.max_num_seqs), max(config.max_num_seqs, config.max_samples)
    step, held = cpu_step_bytes(model, tokens, rows, dtype, parallel), held_bytes(weights, dtype) + adapters_bytes
    step += memory_plan.kept_bytes(sizes_of(model, parallel), config.max_samples, dtype.itemsize)
    if (items := weights.items) is not None:
        held += items.num_rows * items.row_bytes
        step = max(step, items.run_bytes)
    if draft is not None:  # its passes come behind a step, which has given back its memory
        cache.drafter = draft.cache
        step = max(step, cpu_step_bytes(draft.config, tokens, config.max_num_seqs, dtype, draft.parallel))
        held += held_bytes(draft.model, dtype) + (0 if draft.features is None else draft.features.num_bytes)
    states = state_cache_of(model, parallel, dtype, config.mamba_ssm_cache_dtype)
    needs = state_needs(config, model, states.state_bytes)
    is_packed, vocab_size = model.quantization is not None, model.vocab_size
    return cpu_budget(config, cache, held, step, needs, is_packed=is_packed, vocab_size=vocab_size)


def held_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of all weights of a model on a CPU when they will be loaded, for a model that is built and not loaded."""
    return model.weights_bytes + packed_bytes(model, dtype)


def packed_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of second, packed copies that a CPU makes while it loads the weights."""
    tied, small = packed_elements(model)
    return dtype.itemsize * (tied + (small if dtype.itemsize == 4 else 0))


def packed_elements(model: LanguageModel) -> list[int]:
    """[elements of a head tied to the embedding, elements of weights that are packed twice if they are float32], on a CPU."""
    tied, small = 0, 0
    for module in model.modules():
        weight = getattr(module.format, "weight", None) if isinstance(module, Linear) else None
        if weight is None:
            continue
        if _is_shared(model, module, weight):
            tied += weight.numel()
        elif 4 * weight.numel() <= SMALL_BYTES:
            small += weight.numel()
    return [tied, small]


def _is_shared(model: LanguageModel, layer: nn.Module, weight: torch.Tensor) -> bool:
    """Whether a module outside of the layer has its weight, too."""
    own = set(layer.modules())
    return any(p is weight for module in model.modules() if module not in own for p in module._parameters.values())


def graphs_bytes(config: ResolvedEngineConfig, weights_bytes: int, activation_bytes: int, logits_bytes: int) -> int:
    """Memory of the captured graphs: their logits, and as much again as the largest captured step takes to run."""
    most = config.max_num_batched_tokens
    captured = min(most_tokens(weights_bytes), most)
    return 0 if config.enforce_eager else memory_plan.graphs_bytes(captured, most, activation_bytes, logits_bytes)


def asked_for(config: ResolvedEngineConfig, cache: KVCache, room: int, states: StateNeeds) -> tuple[int, int] | None:
    """KV blocks that flags ask for, whatever memory is left, and recurrent states; None without such flags. room: bytes without
    these flags. Raises OutOfMemory for too few to run."""
    num_states, taken = 0, 0
    if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is None:
        num_states, left = states.divide(config.kv_cache_memory_bytes, cache.block_bytes)
        taken = config.kv_cache_memory_bytes - left
    blocks, least = config.requested_blocks(cache.block_bytes, taken), memory_plan.least_blocks(cache.block_bytes)
    if blocks is None:
        return None
    if config.num_gpu_blocks_override is not None:
        num_states, _ = states.divide(room - blocks * cache.block_bytes, 0)
    elif blocks < least:
        raise OutOfMemory(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} has no room for two blocks of {cache.block_bytes} bytes"
        )
    return blocks, num_states


def gpu_budget(
    config: ResolvedEngineConfig,
    cache: KVCache,
    weights_bytes: int,
    activation_bytes: int,
    graphs_bytes: int,
    states: StateNeeds = NO_STATE_NEEDS,
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
    if (asked := asked_for(config, cache, room, states)) is not None:
        return Budget(asked[0], activation_bytes, asked[1])
    num_states, room = states.divide(room, cache.block_bytes)
    blocks = memory_plan.blocks_in(room, cache.block_bytes)
    if blocks < memory_plan.least_blocks(cache.block_bytes) or room < 0:
        raise OutOfMemory(
            f"no memory is left for the KV cache: the GPU has {total / GIB:.1f} GiB, --gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} allows {allowed / GIB:.1f}; weights take {weights_bytes / GIB:.1f}, a step "
            f"{activation_bytes / GIB:.1f}, graphs {graphs_bytes / GIB:.1f}, everything in use {in_use / GIB:.1f}. "
            "Raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"
        )
    return Budget(blocks, activation_bytes, num_states)
