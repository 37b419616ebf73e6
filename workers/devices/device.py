"""Device: the interface between the runner and the hardware. cpu.py and cuda.py implement it.

Both are given a `DeviceContext`: the model's shape, the limits of a step, and the memory that lives as long as the worker. The
step's kernels exist twice with the same signatures, in Triton and in torch. A device names the modules and adds what differs:
how a plan gets to the device and how results get back. A device also makes the attention object (attention/).
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import (
    NO_TOKEN,
    SAMPLING_FILTER,
    SAMPLING_LOGPROBS,
    SAMPLING_MASK,
    SAMPLING_PROCESSORS,
    SAMPLING_RANDOM,
    SAMPLING_WINDOWS,
    USUAL_LOGPROBS,
    draft_words,
)
from quire.kernels.speculation.synthetic import pretend
from quire.kernels.step.tables import (
    LogitsProcessorPool,
    SamplerWorkspace,
    ShardedWorkspace,
    SlotTables,
    StepBuffers,
    WindowIds,
)
from quire.kernels.tuning.current import current
from quire.workers.adapters.lora import StepAdapters
from quire.workers.attention.attention import ModelAttention
from quire.workers.attention.kv_cache import KVCache
from quire.workers.devices.masks import RowMasks
from quire.workers.models.config import ModelConfig
from quire.workers.models.step_context import StepStates
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import StateCache
from quire.workers.recurrent.step_states import RecurrentStates
from quire.workers.speculation.draft_model import DraftDevice
from quire.workers.speculation.drafter import Drafter
from quire.workers.speculation.loaded import DraftModel
from quire.workers.speculation.make import make_drafter


@dataclass
class DeviceContext:
    config: ModelConfig
    cache: KVCache
    pool: LogitsProcessorPool
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    max_tokens: int  # of a step
    max_rows: int
    max_blocks: int  # of a block table
    max_device_words: int  # of a plan
    parallel: Parallel = field(default_factory=Parallel)
    states: StateCache = field(default_factory=StateCache.of_nothing)
    max_samples: int = 0  # in a step with drafts; 0: no step has any
    speculation: SpeculativeConfig | None = None
    draft_model: DraftModel | None = None
    adapters: StepAdapters | None = None  # None: the engine serves no LoRA adapters

    @property
    def sampled_rows(self) -> int:
        """The most samples of a step that are drawn here: 0 in all stages but the last, and of a model that only pools."""
        return max(self.max_rows, self.max_samples) if self.parallel.stage.is_last and self.config.samples else 0


RESULT_DEPTH = 8


class Inputs(NamedTuple):
    """A step's inputs, which are built: padded sizes, or on a CPU the sizes that they have."""

    num_tokens: int
    num_rows: int
    num_samples: int
    states: StepStates | None


def _how(kind: int) -> dict[str, bool]:
    """The sampler's flags for a kind of sampling."""
    flags = {"random": SAMPLING_RANDOM, "filtered": SAMPLING_FILTER, "processors": SAMPLING_PROCESSORS}
    return {name: bool(kind & flag) for name, flag in flags.items()}


class Device(ABC):
    results: torch.Tensor  # int64 [depth, words]: the result ring's words

    def __init__(
        self,
        ctx: DeviceContext,
        step_inputs: ModuleType,
        step_states: ModuleType,
        sampler: ModuleType,
        sampler_sharded: ModuleType,
        accept: ModuleType,
        ngram: ModuleType,
        draft_passes: ModuleType,
        features: ModuleType,
        masks: RowMasks,
        ring: ResultRing | None,
    ):
        self.ctx = ctx
        self._ring = ring
        self._num_top = ring.num_logprobs if ring is not None else USUAL_LOGPROBS
        self.masks = masks
        self._step_inputs = step_inputs
        self.states = RecurrentStates(ctx.states, step_states, ctx.max_rows, ctx.max_samples, ctx.device)
        self.adapters = ctx.adapters or StepAdapters(0)
        self._sampler = sampler
        self._sampler_sharded = sampler_sharded
        self._accept = accept
        rates = ctx.speculation.synthetic_acceptance_rates if ctx.speculation is not None else []
        self._rates = torch.tensor(rates, dtype=torch.float32, device=ctx.device)
        self.drafter: Drafter = make_drafter(ctx.speculation, ctx.cache, ngram, self._draft_model(draft_passes, features))
        self._own = ctx.parallel.vocabulary(ctx.config.vocab_size)  # tokens whose logits this rank computes
        self._sharded_workspace = ShardedWorkspace.allocate(
            0 if self._own.is_whole else ctx.sampled_rows, self._own.size, ctx.device
        )
        self._workspace = SamplerWorkspace.allocate(ctx.sampled_rows, ctx.config.vocab_size, ctx.device)

    def _draft_model(self, kernels: ModuleType, features: ModuleType) -> tuple[DraftModel, DraftDevice] | None:
        ctx, draft = self.ctx, self.ctx.draft_model
        if draft is None:
            return None
        most = ctx.max_tokens + ctx.max_rows  # those of a step, and what its prompts have sampled
        own = replace(ctx, config=draft.config, cache=draft.cache, parallel=draft.parallel, max_tokens=most)
        attention = self.new_attention(replace(own, states=StateCache.of_nothing()))
        return draft, DraftDevice(kernels, features, attention, self.draw, ctx.max_rows, most, ctx.config.vocab_size)

    # ------------------------------------------------------------------------------------------- the same everywhere
    def prepare(
        self,
        plan: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        num_tokens: int,
        num_rows: int,
        windows: bool = False,
    ) -> Inputs:
        """Apply a plan's changes to the tables and build the inputs of a step padded to these sizes. windows: num_rows is the
        number of samples, too."""
        self.drafter.begin(plan, tables)
        self._step_inputs.prepare_step(
            plan,
            tables,
            step,
            num_tokens,
            num_rows,
            block_size=self.ctx.cache.block_size,
            num_blocks=self.ctx.cache.num_blocks,
            vocab=self.ctx.config.vocab_size,
            windows=windows,
            draft_words=self.results[:, draft_words(self.ctx.max_rows, self.ctx.max_samples)] if windows else None,
        )
        self.drafter.extend(step, num_tokens)
        self.adapters.begin(tables, step, num_tokens, num_rows, windows)
        return Inputs(num_tokens, num_rows, num_rows, self.states.begin(plan, tables, step, num_rows, windows))

    def sample(
        self,
        plan: torch.Tensor,
        logits: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        kind: int,
        results: torch.Tensor | None = None,
        processed: torch.Tensor | None = None,
    ) -> None:
        """Sample from logits [rows, V], update the tables, write the results, to `results` if it is given, and draft.

        The logits may be those of this rank's shard of the vocabulary; with windows they are of samples, not of rows. kind:
        SAMPLING_*. processed [rows, V]: logits to sample from instead; log-probabilities are still those of `logits`."""
        rows, vocab, windows = len(logits), self.ctx.config.vocab_size, bool(kind & SAMPLING_WINDOWS)
        if processed is not None or not self._takes_shards(logits, kind):
            logits = self.ctx.parallel.all_logits(logits, vocab)
            sampled, logprobs = self._sample_unsharded(logits, tables, step, kind, processed)
        else:
            slots, positions, _ = self._samples(step, kind, rows)
            sampled, logprobs = self._sample_sharded(logits, slots, positions, tables, kind), None
        if windows:
            if len(self._rates):
                pretend(step, tables, sampled, self._rates, vocab)
            self._accept.accept(step, sampled, rows)
            self.states.end(step, rows)
        self._step_inputs.finish_step(
            plan,
            tables,
            self.ctx.pool,
            step,
            sampled,
            self.results if results is None else results,
            rows,
            max_rows=self.ctx.max_rows,
            logprobs=logprobs,
            max_samples=self.ctx.max_samples,
            windows=windows,
        )
        self.adapters.is_active = False  # drafts are the base model's
        self.drafter.draft(tables, step, rows)

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        window: WindowIds,
        tables: SlotTables,
        kind: int,
    ) -> torch.Tensor:
        """Drafts, int32 [rows]: the tokens that `sample` would draw from these logits at these positions, without masks.

        Nothing is recorded. All ranks have the same; the result holds until something else is drawn."""
        if self._takes_shards(logits, kind):
            return self._sample_sharded(logits, slots, positions, tables, kind)
        logits = self.ctx.parallel.all_logits(logits, self.ctx.config.vocab_size)
        sampled: torch.Tensor = self._sampler.sample(
            logits, slots, positions, tables, self.ctx.pool, self._workspace, **_how(kind), window=window
        )
        return sampled

    def _takes_shards(self, logits: torch.Tensor, kind: int) -> bool:
        """Whether logits are a shard, and tokens are drawn from it. With shards a row's scores are rounded in another way than
        without: whichever rows share a step may not decide."""
        needs_all = kind & ~(SAMPLING_RANDOM | SAMPLING_WINDOWS) or current().fixed_order
        return logits.shape[1] != self.ctx.config.vocab_size and not needs_all

    def finish(self, plan: torch.Tensor, tables: SlotTables, step: StepBuffers, rows: int) -> None:
        """End a step of so many rows where none samples: update the tables and write words of 0."""
        none = torch.zeros(rows, dtype=torch.int32, device=self.ctx.device)
        self._step_inputs.finish_step(
            plan,
            tables,
            self.ctx.pool,
            step,
            none,
            self.results,
            rows,
            max_rows=self.ctx.max_rows,
            max_samples=self.ctx.max_samples,
        )

    def _samples(self, step: StepBuffers, kind: int, count: int) -> tuple[torch.Tensor, torch.Tensor, WindowIds | None]:
        """The slot and the position of each sample, and what the sampler needs to know of windows."""
        if not kind & SAMPLING_WINDOWS:
            return step.row_slots[:count], step.seq_lens[:count], None
        ids = WindowIds(step.input_ids, step.sample_places[:count])
        return step.sample_slots[:count], step.sample_positions[:count], ids

    def _sample_unsharded(
        self,
        logits: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        kind: int,
        processed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Tokens, and the sampler's tensors of their log-probabilities if SAMPLING_LOGPROBS is in `kind`."""
        rows = len(logits)
        slots, positions, window = self._samples(step, kind, rows)
        sampled = self._sampler.sample(
            logits if processed is None else processed,
            slots,
            positions,
            tables,
            self.ctx.pool,
            self._workspace,
            **_how(kind),
            bitmask=self.masks.tensor[:rows] if kind & SAMPLING_MASK else None,
            window=window,
        )
        if processed is not None:  # the operator's own code made these, and may differ between ranks: rank 0's tokens count
            sampled = self.ctx.parallel.all_gather(sampled)[0]
        has_logprobs = bool(kind & SAMPLING_LOGPROBS)
        if not has_logprobs:
            return sampled, None
        return sampled, self._sampler.sampled_logprobs(logits, sampled, self._workspace, self._num_top)

    def _sample_sharded(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tables: SlotTables, kind: int
    ) -> torch.Tensor:
        """Tokens of greedy and plain random rows, from logits sharded over the vocabulary: ranks exchange three words a row."""
        random = bool(kind & SAMPLING_RANDOM)
        pool, sampler, first = self.ctx.pool, self._sampler_sharded, self._own.start
        best = sampler.best_of_shard(logits, first, slots, positions, tables, pool, self._sharded_workspace, random=random)
        sampled: torch.Tensor = sampler.choose(self.ctx.parallel.all_gather(best), slots, tables, random=random)
        return sampled

    def sample_without_masks(
        self,
        plan: torch.Tensor,
        logits: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        kind: int,
        number: int,
        without: np.ndarray,
        processed: torch.Tensor | None = None,
    ) -> None:
        """`sample` for step `number` in which the rows `without` lack their masks, or failed: their result is NO_TOKEN.

        The results go to a scratch buffer and are copied, for the core must never see a token of such a row. Never captured.
        """
        scratch = torch.full_like(self.results, -1, device=self.ctx.device)  # of the same size: no kernel is compiled anew
        self.sample(plan, logits, tables, step, kind, scratch, processed)
        entry = number % len(scratch)
        rows = torch.from_numpy(without.astype(np.int64))
        if scratch.is_cuda:
            rows = rows.pin_memory().to(scratch.device, non_blocking=True)  # a copy from pageable memory would wait for the GPU
        if kind & SAMPLING_WINDOWS:
            rows = step.first_sample.index_select(0, rows).long()
        scratch[entry].index_fill_(0, rows, number << 32 | NO_TOKEN & 0xFFFFFFFF)
        self.results[entry].copy_(scratch[entry], non_blocking=True)

    # --------------------------------------------------------------------------------------------------- what differs
    @abstractmethod
    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        """A plan's words as a tensor that `prepare` and `sample` can read."""

    @abstractmethod
    def new_attention(self, ctx: DeviceContext) -> ModelAttention:
        """The attention of the layers of the context's model, with this device's kernels."""

    @abstractmethod
    def signal(self) -> None:
        """A step has been given to the device: arrange that the core, if it sleeps, is woken when the results are there."""

    def waited_s(self) -> float:
        """Seconds that the device has worked on its current step; 0 where steps end before `signal`."""
        return 0.0

    @abstractmethod
    def stream(self) -> AbstractContextManager[object]:
        """A context in which all of a worker's steps run."""

    @abstractmethod
    def close(self) -> None:
        """End the device's threads and release its memory."""
