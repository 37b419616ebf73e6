"""The CPU as a device, in torch and numpy. Everything is synchronous; nothing is captured."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from quire.ipc.plan import StepPlan
from quire.ipc.result_ring import ResultRing
from quire.kernels import sampler_torch, step_inputs_torch
from quire.kernels.attention_cpu import CpuAttentionPlan, attention_cpu
from quire.kernels.rope_kv_torch import rope_kv
from quire.kernels.tables import SlotTables, StepBuffers
from quire.workers.device import RESULT_DEPTH, Device, DeviceContext, result_words


class CpuDevice(Device):
    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        super().__init__(ctx, step_inputs_torch, sampler_torch)
        self._ring = ring
        self._plans: list[CpuAttentionPlan] = []
        if ring is None:
            words = np.zeros((RESULT_DEPTH, result_words(ctx.max_rows)), np.int64)
        else:
            words = np.frombuffer(ring.buffer, np.int64).reshape(ring.depth, ring.words_per_step)
        self.results = torch.from_numpy(words)

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())  # the ring's own memory is read-only, which torch warns about

    def load_mask(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())

    def begin_attention(self, plan: StepPlan, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int) -> None:
        slots = step.row_slots[:num_rows]
        seq_lens = step.seq_lens[:num_rows].tolist()
        query_lens = step.query_start[: num_rows + 1].diff().tolist()
        cache = self.ctx.cache
        self._plans = [
            CpuAttentionPlan(
                tables.block_table[g].index_select(0, slots),
                seq_lens,
                query_lens,
                cache.k[0],
                dtype=self.ctx.dtype,
                window=window,
            )
            for g, window in enumerate(cache.windows)
        ]

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, step: StepBuffers
    ) -> torch.Tensor:
        c, cache = self.ctx.config, self.ctx.cache
        place = cache.places[layer]
        k, v = cache.k[place.tensor], cache.v[place.tensor]
        t = qkv.shape[0]
        mapping = step.slot_mapping[place.group, :t]
        rope_kv(qkv, step.positions[:t], self.ctx.cos_sin, mapping, k, v, c.num_heads, q_norm, k_norm, c.rms_norm_eps)
        q = qkv[:, : c.num_heads * c.head_dim].unflatten(1, (c.num_heads, c.head_dim))
        out = torch.empty(t, c.num_heads, c.head_dim, dtype=qkv.dtype)
        attention_cpu(q, k, v, out, self._plans[place.group], scale=self.ctx.scale)
        return out.view(t, -1)

    def signal(self) -> None:
        if self._ring is not None:
            self._ring.ring_doorbell()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass
