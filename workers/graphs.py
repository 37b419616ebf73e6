"""Captured steps: a forward graph by padded tokens and rows, a sampling graph by padded rows and kind of sampling (SAMPLING_*).

All metadata is read from the device, so a graph depends on padded sizes (graph_sizes.py), not on which requests are in the
batch or on how many tokens each row has. Graphs share one memory pool; the forward leaves its logits for the sampling graph in
a buffer of their own, and, if the model pools, its rows' hidden states for what is made of them. A draft model's passes are
captured too, as graphs behind these. Some graphs are captured at start, most others while the worker is idle
(`capture_ahead`). A step that comes before its graph is captured then, in 10-20 ms (a full step in the time of an eager run),
without waiting for the device.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

import torch

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import (
    SAMPLING_CUSTOM,
    SAMPLING_FILTER,
    SAMPLING_LOGPROBS,
    SAMPLING_MASK,
    SAMPLING_PROCESSORS,
    SAMPLING_RANDOM,
    SAMPLING_WINDOWS,
)
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.attention import ModelAttention
from quire.workers.capture import captured
from quire.workers.devices.device import DeviceContext
from quire.workers.devices.masks import ReadMasks
from quire.workers.graph_sizes import (
    MAX_ROWS_AHEAD,
    BatchDescriptor,
    GraphSizes,
    mixed_specializations,
    prompt_rows,
    sizes_to_run,
)
from quire.workers.models.language_model import LanguageModel
from quire.workers.outputs.tokens import Tokens

if TYPE_CHECKING:  # CPU engines run where Triton cannot be imported
    from quire.workers.devices.cuda import CudaDevice

log = logging.getLogger("quire.workers")

COMMON_KINDS = (0, SAMPLING_RANDOM)  # greedy, and plain sampling
_RANDOM_PROCESSORS = SAMPLING_RANDOM | SAMPLING_PROCESSORS
WARM_KINDS = (  # between them they run every kernel that a step without grammar masks may need
    0,
    SAMPLING_RANDOM,
    SAMPLING_RANDOM | SAMPLING_FILTER,
    SAMPLING_LOGPROBS,
    SAMPLING_PROCESSORS,
    _RANDOM_PROCESSORS,
    _RANDOM_PROCESSORS | SAMPLING_FILTER,
    SAMPLING_MASK,
)
WARM_WINDOW_KINDS = tuple(  # the same for steps with windows
    kind | SAMPLING_WINDOWS
    for kind in (
        *(0, SAMPLING_LOGPROBS, SAMPLING_PROCESSORS, _RANDOM_PROCESSORS, _RANDOM_PROCESSORS | SAMPLING_FILTER),
        SAMPLING_MASK,
    )
)


class StepRunner(Protocol):
    """The parts of a step that are captured, forward and sampling, as runner.ModelRunner has them."""

    model: LanguageModel
    weights_bytes: int
    ctx: DeviceContext
    tables: SlotTables
    attention: ModelAttention
    buffers: StepBuffers
    samples: bool  # otherwise a step is only its forward
    pools: bool  # some steps need the hidden states that logits are made of
    tokens: Tokens  # if it samples

    def forward(
        self, device_plan: torch.Tensor, num_tokens: int, num_rows: int, num_decode_rows: int | None, *, windows: bool = False
    ) -> torch.Tensor: ...


class StepGraphs:
    """A cache of captured graphs. A missing graph is captured when it is needed; the cache never decides what runs."""

    def __init__(self, runner: StepRunner, device: "CudaDevice"):
        self._runner = runner
        self._device = device
        ctx = runner.ctx
        captures = ctx.adapters is not None and ctx.adapters.captures
        self.sizes = GraphSizes(ctx.max_rows, ctx.max_tokens, runner.weights_bytes, ctx.max_samples, captures)
        own_vocab = ctx.parallel.vocabulary(ctx.config.vocab_size).size
        rows = ctx.sampled_rows if runner.model.has_head else 0
        self._logits = torch.empty(rows, own_vocab, dtype=ctx.dtype, device=ctx.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forward: dict[BatchDescriptor, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[BatchDescriptor, torch.Tensor] = {}  # where a graph leaves its rows' states, if the model pools
        self._sampling: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # (rows, kind)
        self._passes: dict[Hashable, torch.cuda.CUDAGraph] = {}  # of a drafter
        self._ahead = deque(self._useful(self.sizes.ahead()))
        self._masked: deque[tuple[int, int]] = deque()  # sampling graphs with masks to be captured, (rows, kind)

    @property
    def _draws(self) -> bool:
        """Whether steps end in logits and sampling."""
        return self._runner.samples and self._runner.model.has_head

    def _useful(self, batches: list[BatchDescriptor]) -> list[BatchDescriptor]:
        """Those that there can be: without a head no row decodes."""
        return [batch for batch in batches if batch.mixed or self._runner.model.has_head]

    def run(self, plan: StepPlan, read_masks: ReadMasks, pool: Callable[[torch.Tensor], None] = lambda hidden: None) -> bool:
        """Replay the step, which is captured first if need be; its plan must be on the device. False: it must run eagerly.

        pool: called with the rows' hidden states, of a step with rows that are pooled, between forward and sampling."""
        batch = self.sizes.padded(plan)
        if batch is None:
            return False
        rows = batch.rows
        own = plan.sampling_kind & ~SAMPLING_CUSTOM
        kind = own | SAMPLING_MASK if plan.has_mask_rows else own & ~SAMPLING_MASK
        if batch not in self._forward or not self._has_sampling_graph(rows, kind):
            self._capture_met(batch, kind)
        self._forward[batch].replay()
        if not self._runner.samples:
            return True
        if self._runner.pools and (plan.wants_vectors or not self._runner.model.has_head):
            pool(self._hidden[batch])
        if not self._runner.model.has_head:
            return True
        if plan.sampling_kind & SAMPLING_CUSTOM:
            self._runner.tokens.sample_processed(plan, self._device.plan, self._logits[:rows], read_masks)
        elif plan.has_mask_rows and len(without := self._runner.tokens.load_masks(plan, read_masks)):
            self._runner.tokens.sample(self._device.plan, self._logits[:rows], kind, plan.step, without)
        else:
            self._sampling[rows, kind].replay()
        return True

    def _has_sampling_graph(self, rows: int, kind: int) -> bool:
        return (rows, kind) in self._sampling or not self._draws

    def capture(self, batch: BatchDescriptor, kind: int) -> None:
        """Capture what is missing. Capturing runs nothing, so no state changes."""
        rows = batch.rows
        if batch not in self._forward:
            self._forward[batch] = self._captured(lambda: self._keep(batch, self._run_forward(batch)))
        if not self._has_sampling_graph(rows, kind):
            self._sampling[rows, kind] = self._captured(lambda: self._run_sampling(rows, kind))

    def _keep(self, batch: BatchDescriptor, hidden: torch.Tensor) -> None:
        if self._runner.pools:
            self._hidden[batch] = hidden

    def _capture_met(self, batch: BatchDescriptor, kind: int) -> None:
        """Capture a step that is to be run now. If no memory is left for it, all other graphs are dropped.

        It must not run eagerly instead: only this rank would decide so, and exchanges in other ranks' graphs would wait.
        """
        self._with_room(lambda: self.capture(batch, kind), batch.tokens)

    def _with_room(self, capture: Callable[[], None], tokens: int) -> None:
        try:
            return capture()
        except torch.OutOfMemoryError:
            log.warning("no memory is left for a graph of %d tokens: all others are dropped, to be captured anew", tokens)
        # outside of the except clause: the error's frames keep the failed capture, and all that it had computed, alive
        self._drop()
        capture()

    def prepare(self, key: Hashable, run: Callable[[], None]) -> None:
        """Capture what `run` launches, as a drafter's pass of this key, unless that was done. Raises torch.OutOfMemoryError."""
        if key not in self._passes:
            self._passes[key] = self._captured(run)

    def replay(self, key: Hashable, run: Callable[[], None], tokens: int) -> None:
        """Do what `run` launches, as a graph; tokens: of the pass."""
        if key not in self._passes:
            self._with_room(lambda: self.prepare(key, run), tokens)
        self._passes[key].replay()

    def _drop(self) -> None:
        torch.cuda.synchronize()  # a graph that is being replayed must not be freed
        self._forward.clear()
        self._hidden.clear()
        self._sampling.clear()
        self._passes.clear()
        self._ahead.clear()
        self._masked.clear()
        self._pool = torch.cuda.graph_pool_handle()  # torch gives a pool back with its last graph, and refuses to use it again
        torch.cuda.empty_cache()

    def run_kernels(self) -> None:
        """Run every kernel that a step may need, by eager steps of padding: compiling later would stall all requests."""
        self._device.load_plan(_no_rows().encode())
        # the filter kernel with processors comes first, since it takes longest to compile
        for kind in reversed(WARM_KINDS) if self._draws else ():
            self._run_sampling(1, kind)
        sizes, decode = self.sizes, self.sizes.decode
        mixed = mixed_specializations(sizes.all_tokens, sizes.mixed_rows, self._specialization)
        mixed = mixed or [BatchDescriptor(min(4, decode[-1]), 1, True)]
        for batch in (*mixed, BatchDescriptor(mixed[0].tokens, prompt_rows([mixed[0].rows]), True, True)):
            self._run_forward(batch)
        for size in sizes_to_run(decode):
            self._run_forward(BatchDescriptor(size, size, False))
        for batch in sizes.adapters_to_run():
            self._run_forward(batch)
        if sizes.samples:
            self._run_window_kernels()
        self._device.drafter.run_kernels(self._runner.tables, self._runner.buffers)

    def _run_window_kernels(self) -> None:
        for kind in reversed(WARM_WINDOW_KINDS):
            self._run_sampling(1, kind)
        self._device.states.apply_nothing(self._runner.tables, self._runner.model)

        def specialization(num_tokens: int, num_rows: int) -> Hashable:
            return self._specialization(num_tokens, num_rows, windows=True)

        mixed = mixed_specializations(self.sizes.all_tokens, self.sizes.mixed_samples, specialization)
        for batch in (*mixed, *(BatchDescriptor(n, n, False) for n in self.sizes.samples)):
            self._run_forward(batch._replace(windows=True))

    def _specialization(self, num_tokens: int, num_rows: int, windows: bool = False) -> Hashable:
        """Mixed steps with equal values here run the same compiled kernels; num_tokens and num_rows are padded sizes."""
        attention = self._runner.attention.kernel_specialization(num_tokens, num_rows, windows)
        return self._device.kernel_specialization(num_tokens), attention

    def warm_up(self) -> float:
        """Run all kernels, then capture the steps that serving begins with; returns seconds."""
        begin = time.perf_counter()
        with self._runner.model.short():
            self.run_kernels()
        for batch in self._useful(self.sizes.at_start()):
            if not self._capture_unmet(batch):
                break
        with contextlib.suppress(torch.OutOfMemoryError):  # each is captured when it is needed, which makes room
            self._device.drafter.capture(self, self._runner.tables, self._runner.buffers)
        return time.perf_counter() - begin

    def capture_ahead(self) -> bool:
        """Capture one step ahead of its first use, if the device is idle; False if none is left to capture."""
        if self._ahead and self._device.is_idle():
            self._capture_unmet(self._ahead.popleft())
        return bool(self._ahead)

    def expect_masks(self) -> None:
        """The first grammar was admitted: queue sampling graphs with masks for capture, those of few rows first."""
        if not self._draws:
            return
        sizes = self.sizes
        rows = {*sizes.decode, prompt_rows(sizes.mixed_rows), *sizes.mixed_rows}
        graphs = [(r, k) for r in rows for k in COMMON_KINDS]
        graphs += [(r, k | SAMPLING_WINDOWS) for r in {*sizes.samples, *sizes.mixed_samples} for k in COMMON_KINDS]
        self._masked = deque((r, k | SAMPLING_MASK) for r, k in sorted(graphs) if r <= MAX_ROWS_AHEAD)

    def capture_masked_sampling_graph(self) -> None:
        """Capture one of the queued graphs. It takes some milliseconds, in which the device works on the last step."""
        while self._masked:
            rows, kind = self._masked.popleft()
            if (rows, kind) in self._sampling:
                continue
            try:
                self._sampling[rows, kind] = self._captured(lambda: self._run_sampling(rows, kind))  # noqa: B023 (runs now)
            except torch.OutOfMemoryError:
                self._masked.clear()  # each is captured when a step needs it, which makes room
            return

    def _capture_unmet(self, batch: BatchDescriptor) -> bool:
        """Capture a step with the common kinds of sampling. False if there is no memory; then no more are captured ahead."""
        try:
            for kind in COMMON_KINDS:
                self.capture(batch, kind | SAMPLING_WINDOWS if batch.windows else kind)
            return True
        except torch.OutOfMemoryError:
            log.warning("no memory is left for more graphs: steps are captured only when they are met")
            self._ahead.clear()
            return False

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return captured(run, self._pool)

    def _run_forward(self, batch: BatchDescriptor) -> torch.Tensor:
        tokens, rows, mixed, prompts_only, windows, self._device.adapters.is_active = batch
        r = self._runner
        num_decode_rows = 0 if prompts_only else None if mixed else rows
        hidden = r.forward(self._device.plan, tokens, rows, num_decode_rows, windows=windows)
        if self._draws:
            r.model.compute_logits(hidden, self._logits[:rows])
        self._device.adapters.is_active = False  # a draft model's passes may come next
        return hidden

    def _run_sampling(self, rows: int, kind: int) -> None:
        self._runner.tokens.sample(self._device.plan, self._logits[:rows], kind)


def _no_rows() -> StepPlan:
    return StepPlan(0, {})
