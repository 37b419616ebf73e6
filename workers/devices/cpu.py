"""The CPU as a device, in torch and numpy. Everything is synchronous; nothing is captured.

A step of one row of a small model is a few hundred calls into torch, and their number decides how long it takes.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import result_words
from quire.kernels.sampling import sampler_cpu, sampler_sharded_cpu
from quire.kernels.speculation import accept_cpu, draft_passes_cpu, features_cpu, ngram_cpu
from quire.kernels.step import step_inputs_cpu, step_states_cpu
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.cpu import CpuModelAttention
from quire.workers.devices.device import RESULT_DEPTH, Device, DeviceContext, Inputs
from quire.workers.devices.masks import CpuMasks


class CpuDevice(Device):
    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        super().__init__(
            ctx,
            step_inputs_cpu,
            step_states_cpu,
            sampler_cpu,
            sampler_sharded_cpu,
            accept_cpu,
            ngram_cpu,
            draft_passes_cpu,
            features_cpu,
            CpuMasks(ctx.sampled_rows, ctx.config.vocab_size),
            ring,
        )
        if ring is None:
            words = np.zeros((RESULT_DEPTH, result_words(ctx.max_rows, max_samples=ctx.max_samples)), np.int64)
        else:
            words = np.frombuffer(ring.buffer, np.int64).reshape(ring.depth, ring.words_per_step)
        self.results = torch.from_numpy(words)

    def prepare(
        self,
        plan: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        num_tokens: int,
        num_rows: int,
        windows: bool = False,
    ) -> Inputs:
        inputs = super().prepare(plan, tables, step, num_tokens, num_rows, windows)
        if not windows:
            return inputs
        # there may be fewer drafts than the plan has room for, and padding costs time
        rows, num_samples = int(step.num_rows[0]), int(step.num_samples[0])
        tokens = int(step.query_start[rows])
        self.adapters.begin(tables, step, tokens, num_samples, windows)
        return inputs._replace(num_tokens=tokens, num_rows=rows, num_samples=num_samples)

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())  # the ring's own memory is read-only, which torch warns about

    def new_attention(self, ctx: DeviceContext) -> CpuModelAttention:
        return CpuModelAttention(ctx)

    def signal(self) -> None:
        if self._ring is not None:
            self._ring.ring_doorbell()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass
