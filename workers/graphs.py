"""Captured steps of decode rows: a forward graph by padded rows, a tail graph by padded rows and sampler variant.

All metadata is read from the device, so a graph depends on padded sizes and not on who is in the batch. Graphs share one memory
pool, and are replayed back to back on one stream; logits pass from forward to tail in a buffer of their own. A size that
was not captured at start is captured when it is first met (10-20 ms).
"""

import bisect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.ipc.plan import VARIANT_MASK, VARIANT_RANDOM, StepPlan

if TYPE_CHECKING:
    from quire.workers.runner import ModelRunner

NO_ROWS = np.zeros(0, np.int32)


def padded_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that steps are padded to: close together where a row costs a larger part of the step."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows + 1, 64)]
    return sorted({min(s, max_rows) for s in (*sizes, max_rows)})


class StepGraphs:
    def __init__(self, runner: "ModelRunner"):
        self._runner = runner
        self._device = runner.device
        ctx = runner.ctx
        self.sizes = padded_sizes(min(ctx.max_rows, ctx.max_tokens))
        self._logits = torch.empty(ctx.max_rows, ctx.config.vocab_size, dtype=ctx.dtype, device=ctx.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._tail: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def run(self, plan: StepPlan, read_mask: Callable[[], np.ndarray]) -> bool:
        """Replay the step if it is one of decode rows only; its plan must be on the device already."""
        if len(plan.prefill_rows) or not len(plan.decode_rows):
            return False
        rows = self.sizes[bisect.bisect_left(self.sizes, len(plan.decode_rows))]
        variant = plan.variant | VARIANT_MASK if plan.late_mask else plan.variant & ~VARIANT_MASK
        if rows not in self._forward or (rows, variant) not in self._tail:
            self.capture(rows, variant)
        self._forward[rows].replay()
        if plan.late_mask:
            self._device.load_mask(read_mask().reshape(len(plan.decode_rows), -1))
        self._tail[rows, variant].replay()
        return True

    def capture(self, rows: int, variant: int) -> None:
        """Capture what is missing for `rows` padded rows. Capturing runs nothing, so no state changes."""
        if rows not in self._forward:
            self._forward[rows] = self._captured(lambda: self._run_forward(rows))
        if (rows, variant) not in self._tail:
            self._tail[rows, variant] = self._captured(lambda: self._run_tail(rows, variant))

    def warm_up(self) -> float:
        """Compile the kernels by an eager run of rows that are all padding, then capture every size; returns seconds."""
        begin = time.perf_counter()
        self._device.load_plan(_decode_plan_of(0).encode())
        for variant in (0, VARIANT_RANDOM):
            self._run_forward(1)
            self._run_tail(1, variant)
            for rows in reversed(self.sizes):
                self.capture(rows, variant)
        return time.perf_counter() - begin

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph

    def _run_forward(self, rows: int) -> None:
        r = self._runner
        plan = _decode_plan_of(rows)
        hidden = r.forward(plan, self._device.plan, rows, rows)  # type: ignore[attr-defined]
        r.model.compute_logits(hidden, out=self._logits[:rows])

    def _run_tail(self, rows: int, variant: int) -> None:
        mask = self._device.mask[:rows] if variant & VARIANT_MASK else None  # type: ignore[attr-defined]
        self._runner.tail(self._device.plan, self._logits[:rows], variant, mask)  # type: ignore[attr-defined]


def _decode_plan_of(rows: int) -> StepPlan:
    """A plan of `rows` decode rows, for what the host needs to know of one."""
    none = np.zeros((0, 8), np.int32)
    return StepPlan(0, none, none, np.zeros(rows, np.int32), none, NO_ROWS, NO_ROWS)
