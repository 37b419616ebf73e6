"""The CPU as a device: what the runner asks of a device, in torch and numpy. Everything is synchronous; nothing is captured.

cuda.py has the same class for a GPU. `plan` tensors are the ring's memory itself; results go out through the ring's own writer.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from quire.ipc.plan import StepPlan
from quire.ipc.result_ring import ResultRing
from quire.kernels import step_inputs_torch as step_inputs
from quire.kernels.attention_cpu import CpuAttentionPlan, attention_cpu
from quire.kernels.rope_kv_torch import rope_kv
from quire.kernels.sampler_torch import SamplerWorkspace, sample
from quire.kernels.tables import SlotTables, StepBuffers
from quire.workers.device import DeviceContext


class CpuDevice:
    """Step inputs, attention, sampling and results on the CPU."""

    can_capture = False

    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        self.ctx = ctx
        self._ring = ring
        words = ring.words_per_step if ring is not None else ctx.max_rows * 43
        depth = ring.depth if ring is not None else 8
        memory = np.frombuffer(ring.buffer, np.int64) if ring is not None else np.zeros(depth * words, np.int64)
        self.results = torch.from_numpy(memory[: depth * words].reshape(depth, words))
        self._sampler = SamplerWorkspace.allocate(ctx.max_rows, ctx.config.vocab_size, "cpu")
        self._plans: list[CpuAttentionPlan] = []

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())  # the ring's own memory is read-only, which torch warns about

    def load_mask(self, words: np.ndarray) -> torch.Tensor:
        """Grammar masks int32 [rows, ceil(V / 32)]."""
        return torch.from_numpy(words.copy())

    def prepare(self, plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int) -> None:
        cache = self.ctx.cache
        step_inputs.prepare_step(
            plan,
            tables,
            step,
            num_tokens,
            num_rows,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            vocab=self.ctx.config.vocab_size,
        )

    def begin_attention(self, host_plan: StepPlan, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int) -> None:
        """Index arithmetic that all layers of a group share."""
        slots = step.row_slots[:num_rows].long()
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
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        step: StepBuffers,
    ) -> torch.Tensor:
        """Rotate, write KV, attend: qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
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

    def sample(
        self, logits: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int, variant: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        return sample(
            logits, step.row_slots[:num_rows], step.seq_lens[:num_rows], tables, self.ctx.pool, self._sampler, variant, mask
        )

    def finish(
        self,
        plan: torch.Tensor,
        tables: SlotTables,
        step: StepBuffers,
        sampled: torch.Tensor,
        logprobs: tuple[torch.Tensor, ...] | None,
        num_rows: int,
    ) -> None:
        step_inputs.finish_step(
            plan,
            tables,
            self.ctx.pool,
            step,
            sampled,
            self.results,
            num_rows,
            max_rows=self.ctx.max_rows,
            logprobs=logprobs,  # type: ignore[arg-type]
        )

    def signal(self) -> None:
        """The step's results are there."""
        if self._ring is not None:
            self._ring.ring_doorbell()

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...
