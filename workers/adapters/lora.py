"""Adapters in a step: which adapter each token has (`StepAdapters`), and what a layer adds for it (`LoraLayer`).

A Linear's products get no context, so all layers share one StepAdapters. The device fills it for each step that has a row with
an adapter; in other steps it is inactive, and layers compute as if there were no adapters. A layer sees the step's tokens or,
behind the last attention, its samples, and tells them apart by their number: where both are equally many they are the same
tokens, which `GraphSizes` sees to for padded steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.kernels.elementwise.norm_reference import Term
from quire.kernels.lora import lora_reference
from quire.kernels.lora.tables import RANK_STEP, LoraSchedule, LoraWeights, Shrink
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.layers import ops
from quire.workers.layers.adapter import Adapter
from quire.workers.shard import RowShard, Shard

NO_IDS = np.zeros(0, np.int32)
TOKENS, SAMPLES, SOME_TOKENS = 0, 1, 2  # which of a step's lists a layer sees
MAX_TERM_ROWS = 512  # tokens of a step in which norms add adapters' terms: each token reads its adapter's B


class Pairs(NamedTuple):
    """Pairs of token and expert, one after another: ids int32 [T, k] and the number of experts of this rank.

    groups: the pairs by adapter and expert. kernels: the module of the products."""

    ids: torch.Tensor
    num_experts: int
    groups: Any
    kernels: ModuleType

    def product(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[P, N] of x [P, K], by each pair's expert's weight, w [E, N, K]."""
        y: torch.Tensor = self.kernels.pair_product(x, w, bias, self.ids.flatten())
        return y

    def add_up(
        self, y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, are_some: bool
    ) -> torch.Tensor:  # fmt: skip
        """[T, H] of y [T k, H]. are_some: some experts are other ranks'."""
        held = self.num_experts if are_some else 0
        out: torch.Tensor = self.kernels.add_up(y, weights, shared, self.ids, held)
        return out


class StepAdapters:
    """The adapters of the step that is being computed. Subclasses group its tokens by adapter, and compute with them."""

    is_active = False  # some row of the step has an adapter

    def __init__(self, num_slots: int, captures: bool = False) -> None:
        """captures: graphs of steps with adapters are captured at the start."""
        self.num_slots, self.captures = num_slots, captures
        self._num_tokens = self._num_samples = 0
        self._num_some: int | None = None  # in `of_tokens`

    def begin(self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_samples: int, has_windows: bool) -> None:
        """A step of these padded sizes begins; its inputs are in `step`. Does nothing unless it is active."""
        self._num_tokens, self._num_samples = num_tokens, num_samples
        if self.is_active:
            self._group(tables, step, num_tokens, num_samples, has_windows)

    def shrink(self, x: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        """The tensor that `expand` needs, made of x [T, in] or of ids int32 [T]."""
        return x

    def beside(self, tokens: int, weights: LoraWeights) -> Shrink | None:
        """All that the kernel of a product of so many tokens needs to compute `shrink` itself; None: it must not."""
        return None

    def term(self, h: torch.Tensor, tokens: int, weights: LoraWeights) -> Term | None:
        """All that a norm's kernel needs to do as `expand` for so many tokens; None: it must not."""
        return None

    def expand(self, h: torch.Tensor, y: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        """y [T, out] with what the tokens' adapters make of the input, in place; h of `shrink`."""
        raise NotImplementedError

    def expand_gated(self, h: torch.Tensor, y: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        """silu(gate) · up [T, out / 2] of gate|up with the adapters added; y [T, out] may change."""
        return ops.silu_mul(self.expand(h, y, weights))

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        """The pairs of tokens and their experts ids int32 [T, k], of which this rank has so many."""
        return self._pairs(ids, num_experts, self._which(len(ids)))

    def add_to_pairs(self, x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, pairs: Pairs) -> torch.Tensor:
        """`add` for x [P, in] and y [P, out] of pairs; the weights' slots are those of adapter and expert."""
        raise NotImplementedError

    @contextmanager
    def of_tokens(self, first: int, count: int) -> Iterator[None]:
        """A context in which layers see `count` of the step's tokens, from number `first` on."""
        self._group_some(first, count)
        self._num_some = count
        try:
            yield
        finally:
            self._num_some = None

    def _which(self, count: int) -> int:
        if self._num_some is not None:
            return SOME_TOKENS
        if count == self._num_tokens:
            return TOKENS
        if count == self._num_samples:
            return SAMPLES
        raise RuntimeError(f"a layer has {count} inputs in a step of {self._num_tokens} tokens and {self._num_samples} samples")

    def _group(
        self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_samples: int, has_windows: bool
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def _group_some(self, first: int, count: int) -> None:
        raise NotImplementedError

    def _pairs(self, ids: torch.Tensor, num_experts: int, which: int) -> Pairs:
        raise NotImplementedError


class CpuStepAdapters(StepAdapters):
    """In torch."""

    def __init__(self, num_slots: int, captures: bool = False) -> None:
        super().__init__(num_slots, captures)
        self._ids = [NO_IDS] * 3
        self._groups: list[lora_reference.Groups] = [[]] * 3

    def _group(
        self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_samples: int, has_windows: bool
    ) -> None:  # fmt: skip
        tokens = lora_reference.adapter_ids(tables, step, num_tokens)
        self._ids = [tokens, lora_reference.sample_ids(tables, step, num_samples, has_windows), NO_IDS]
        self._groups = [lora_reference.groups_of(ids) for ids in self._ids]

    def _group_some(self, first: int, count: int) -> None:
        self._ids[SOME_TOKENS] = self._ids[TOKENS][first : first + count]
        self._groups[SOME_TOKENS] = lora_reference.groups_of(self._ids[SOME_TOKENS])

    def expand(self, h: torch.Tensor, y: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        return lora_reference.add_lora(h, y, weights, self._groups[self._which(len(y))])

    def _pairs(self, ids: torch.Tensor, num_experts: int, which: int) -> Pairs:
        groups = lora_reference.groups_of(lora_reference.pair_ids(self._ids[which], ids.numpy(), num_experts))
        return Pairs(ids, num_experts, groups, lora_reference)

    def add_to_pairs(self, x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, pairs: Pairs) -> torch.Tensor:
        return lora_reference.add_lora(x, y, weights, pairs.groups)


class CudaStepAdapters(StepAdapters):
    """By our kernels. max_tokens: of a step."""

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device, captures: bool = False) -> None:
        from quire.kernels.lora import experts, products, schedule  # these import Triton
        from quire.kernels.triton_support.dependent_launch import PLAIN, mode_for_split_k

        super().__init__(num_slots, captures)
        self._schedule = LoraSchedule.allocate(max_tokens, num_slots, device)
        self._schedules, self._products, self._experts = schedule, products, experts
        self._mode_for, self._plain = mode_for_split_k, PLAIN

    def _group(
        self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_samples: int, has_windows: bool
    ) -> None:  # fmt: skip
        self._schedules.schedule(
            tables,
            step,
            self._schedule,
            num_tokens,
            num_samples,
            self.num_slots,
            has_windows=has_windows,
            has_samples=num_samples != num_tokens,
        )

    def shrink(self, x: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        return self._call(self._products.shrink, x, weights)

    def beside(self, tokens: int, weights: LoraWeights) -> Shrink | None:
        which = self._which(tokens)
        if which == SOME_TOKENS:  # grouped by the launch before, which a dependent one must not read ahead of its wait
            return None
        return Shrink(weights.a, weights.ranks, self._schedule.ids[which])

    def term(self, h: torch.Tensor, tokens: int, weights: LoraWeights) -> Term | None:
        [(_, end), *others], which = weights.pieces, self._which(tokens)
        if others or which == SOME_TOKENS or tokens > MAX_TERM_ROWS or not ops.norm_takes_term(end, weights.max_rank):
            return None
        return Term(h, weights.b, weights.ranks, weights.scales, self._schedule.ids[which], RANK_STEP)

    def expand(self, h: torch.Tensor, y: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        return self._call(self._products.expand, h, y, weights)

    def expand_gated(self, h: torch.Tensor, y: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
        if not weights.is_gate_up:
            return super().expand_gated(h, y, weights)
        return self._call(self._products.expand_gated, h, y, weights)

    def _call(self, kernel: Callable[..., torch.Tensor], *tensors: Any) -> torch.Tensor:
        """The kernel for a step's tokens, as many as the tensor before the weights has rows."""
        rows = len(tensors[-2])
        which = self._which(rows)
        mode = self._plain if which == SOME_TOKENS else self._mode_for(rows)
        return kernel(*tensors, self._schedule, which, pdl=mode)

    def _group_some(self, first: int, count: int) -> None:
        ids = self._schedule.ids
        ids[SOME_TOKENS, :count].copy_(ids[TOKENS, first : first + count])
        self._schedules.group(self._schedule, count, self.num_slots, SOME_TOKENS)

    def _pairs(self, ids: torch.Tensor, num_experts: int, which: int) -> Pairs:
        adapters = self._schedule.ids[which, : len(ids)]
        groups = self._experts.schedule_pairs(adapters, ids, self.num_slots, num_experts, self._schedule.arrived)
        return Pairs(ids, num_experts, groups, self._experts)

    def add_to_pairs(self, x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, pairs: Pairs) -> torch.Tensor:
        added: torch.Tensor = self._products.add_lora(x, y, weights, pairs.groups, TOKENS)
        return added


class Piece(NamedTuple):
    """One of the checkpoint's layers within a LoraLayer: this rank's parts of its input and output.

    An embedding's input is the vocabulary. multiplier: the layer's output is multiplied by it.
    """

    layer: "LoraLayer"
    number: int
    columns: Shard
    rows: RowShard
    multiplier: float = 1.0


class LoraLayer(Adapter):
    """The adapter slot of a Linear or an embedding: the adapters of its layers, by adapter slot.

    inputs, outputs: as a Linear has them. A piece that an adapter leaves as it is has rank 0.
    """

    def __init__(
        self,
        inputs: Shard,
        outputs: Mapping[str, RowShard],
        steps: StepAdapters,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_table: bool = False,
        multiplier: float = 1.0,
    ) -> None:
        self.steps = steps
        sizes = [rows.size for rows in outputs.values()]
        self.weights = LoraWeights.allocate(steps.num_slots, max_rank, inputs.size, sizes, dtype, device, is_table=is_table)
        numbered = enumerate(outputs.items())
        self.pieces = {name: Piece(self, number, inputs, rows, multiplier) for number, (name, rows) in numbered}

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps.shrink(x, self.weights)

    def beside(self, x: torch.Tensor) -> Shrink | None:
        return self.steps.beside(len(x), self.weights)

    def term(self, h: torch.Tensor, num_tokens: int) -> Term | None:
        return self.steps.term(h, num_tokens, self.weights)

    def expand(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.steps.expand(h, y, self.weights)

    def expand_gated(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.steps.expand_gated(h, y, self.weights)
