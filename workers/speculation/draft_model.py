"""DraftModelDrafter: a smaller model with the same tokens drafts (speculative decoding, arXiv:2211.17192).

    begin     a plan's new sequences: their block tables are emptied, so that what a table reaches can be told
    extend    the step's tokens are noted by KV slot: a block table then reads a sequence's whole text
    follow    behind the step's sampling: a pass over the known tokens that the model has not computed, and then one pass for
              each further draft. The work of a pass is decided on the device (kernels/speculation/draft_passes.py)

Its layers have keys and values of their own under the block table of the target's full attention. Drafts are drawn as the
target draws: with the request's noise, parameters and penalties, so a draft model that agrees with the target has the same
tokens at every temperature. Passes have padded sizes and are captured as graphs: no first token waits for them.
"""

from dataclasses import replace
from functools import cached_property, partial
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import MAX_WINDOW
from quire.kernels.speculation.draft_state import DraftState
from quire.kernels.step.tables import SlotTables, StepBuffers, WindowIds
from quire.workers.attention.attention import ModelAttention
from quire.workers.attention.kv_cache import KVCache
from quire.workers.models.step_context import step_context
from quire.workers.speculation.drafter import Drafter, Graphs
from quire.workers.speculation.loaded import DraftModel
from quire.workers.speculation.pass_sizes import DraftPass, DraftPassSizes, pass_of
from quire.workers.speculation.whole_texts import full_attention_group


class Draw(Protocol):
    """Draws drafts from logits as the target's tokens are drawn (Device.draw)."""

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        window: WindowIds,
        tables: SlotTables,
        kind: int,
    ) -> torch.Tensor: ...


class DraftDevice(NamedTuple):
    """The parts of the device that a draft model needs."""

    kernels: ModuleType  # kernels/speculation/draft_passes, or its functions for a CPU
    features: ModuleType  # kernels/speculation/features, or its function for a CPU
    attention: ModelAttention  # of the draft model's layers
    draw: Draw
    max_rows: int  # of a step
    max_tokens: int
    vocab_size: int  # the target's


class DraftModelDrafter(Drafter):
    def __init__(self, config: SpeculativeConfig, cache: KVCache, draft: DraftModel, device: DraftDevice) -> None:
        """cache: the target's. Raises ModelConfigError."""
        self._draft, self._cache, self._group = draft, cache, full_attention_group(cache)
        self._kernels, self._features, self._attention, self.draw_tokens, rows, self.max_tokens, self._vocab_size = device
        self._depth, place = config.num_speculative_tokens, draft.parallel.device
        self.state = DraftState.allocate(0, cache.block_size, rows, place)
        inputs, groups = StepBuffers.allocate(self.max_tokens, rows, 1, place), len(draft.cache.groups)
        self._inputs = replace(inputs, slot_mapping=inputs.slot_mapping.expand(groups, -1))  # all groups have one block table
        self._tables: SlotTables | None = None  # those of the runner, with that table for each group
        self._max_rows = rows

    def begin(self, plan: torch.Tensor, tables: SlotTables) -> None:
        cache = self._cache
        if len(self.state.filled) != cache.num_blocks:  # the cache was allocated meanwhile
            self.state.renew(cache.num_blocks, cache.block_size)
            self._draft.renew(cache.num_blocks)
        self._kernels.begin_sequences(plan, tables, self.state, self._group)

    def extend(self, step: StepBuffers, num_tokens: int) -> None:
        self._kernels.note_tokens(step, self.state, self._group, num_tokens, block_size=self._cache.block_size)

    def follow(self, plan: StepPlan, tables: SlotTables, step: StepBuffers, graphs: Graphs | None) -> None:
        if (wanted := pass_of(plan, self.max_tokens, reads_all=self._draft.reads_all)) is None:
            return
        captured = None if graphs is None else self._pass_sizes.padded(wanted)
        if graphs is None or captured is None:
            return self.run(wanted, tables, step)
        return graphs.replay(captured, lambda: self.run(captured, tables, step), captured.tokens)

    def run_kernels(self, tables: SlotTables, step: StepBuffers) -> None:
        with self._draft.model.short():
            for some in self._pass_sizes.to_run(self._depth):
                self.run(some, tables, step)

    def capture(self, graphs: Graphs, tables: SlotTables, step: StepBuffers) -> None:
        for some in self._pass_sizes.at_start(self._depth):
            graphs.prepare(some, partial(self.run, some, tables, step))

    @cached_property
    def _pass_sizes(self) -> DraftPassSizes:
        draft = self._draft
        return DraftPassSizes(self._max_rows, self.max_tokens, draft.model.weights_bytes, reads_all=draft.reads_all)

    def run(self, some: DraftPass, tables: SlotTables, step: StepBuffers) -> None:
        """Compute what is missing, then draft. Nothing here depends on values on the device, except on a CPU."""
        kernels, inputs, own = self._kernels, self._inputs, self._own(tables)
        size, vocab = self._cache.block_size, self._draft.config.vocab_size
        arguments = (tables, step, self.state, inputs, self._group, some.tokens, some.rows)
        how = {"block_size": size, "depth": some.depth, "longest": self._draft.longest, "vocab": vocab}
        tokens, rows = kernels.begin_pass(*arguments, **how)
        self._draft.read(self._features, tables, step, inputs, some.tokens, self._group, tokens, rows, size)
        if not tokens:
            return
        decode_rows = None if some.mixed else rows
        if not some.depth and self._draft.writes_alone:
            self._attention.begin_writes(own, inputs, tokens, rows)
        else:
            self._attention.begin(own, inputs, tokens, rows, decode_rows, windows=True, has_more_tokens=True)
        context = step_context(self._attention.attend, inputs, tokens, rows, decode_rows)
        given = inputs.input_ids[:tokens], context, inputs.logits_indices[:rows]
        if not some.depth:
            return self._draft.write(*given)
        hidden = self._draft.model(*given)
        for place in range(some.depth):
            drawn = self._draw(hidden, tables, place, some.kind)
            at = (tables, self.state, inputs, self._group, drawn, place, rows)
            if not kernels.next_drafts(*at, block_size=size, vocab=vocab) or place + 1 == some.depth:
                return
            self._attention.begin(own, inputs, rows, rows, rows)
            hidden = self._draft.model(inputs.input_ids[:rows], step_context(self._attention.attend, inputs, rows, rows, rows))

    def _draw(self, hidden: torch.Tensor, tables: SlotTables, place: int, kind: int) -> torch.Tensor:
        state, rows = self.state, len(hidden)
        window = WindowIds(state.ids.view(-1), state.places[:rows], MAX_WINDOW)
        return self.draw_tokens(self._logits(hidden), state.slots[:rows], state.positions[:rows], window, tables, kind)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the target's ids: vocabularies of one tokenizer may be padded to different sizes."""
        logits, own, target = self._draft.model.compute_logits(hidden), self._draft.config.vocab_size, self._vocab_size
        if own == target:
            return logits
        logits = self._draft.parallel.all_logits(logits, own)
        return F.pad(logits, (0, target - own), value=-torch.inf) if target > own else logits[:, :target]

    def _own(self, tables: SlotTables) -> SlotTables:
        if self._tables is None:
            table = tables.block_table[self._group].expand(len(self._draft.cache.groups), -1, -1)
            self._tables = replace(tables, block_table=table)
        return self._tables
