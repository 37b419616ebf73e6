"""The CPU as a device, in torch and numpy. Everything is synchronous; nothing is captured.

What layers share is made once a step: rotations, the cache lines to write and to read. At one row a step of a small model is a
few hundred calls into torch, and their number is what it costs.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import numpy as np
import torch

from quire.ipc.step.result_ring import ResultRing
from quire.kernels.attention.attention_cpu import CpuAttentionPlan, Scratch, attend_lines
from quire.kernels.attention.kv_lines_cpu import as_lines, line_strides, token_lines
from quire.kernels.attention.rope_kv_cpu import Writes, head_weights, rope_kv, rotations
from quire.kernels.sampling import sampler_cpu
from quire.kernels.step import step_inputs_cpu
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.devices.device import RESULT_DEPTH, Device, DeviceContext, result_words
from quire.workers.devices.masks import CpuMasks


class CpuDevice(Device):
    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        super().__init__(ctx, step_inputs_cpu, sampler_cpu, CpuMasks(ctx.max_rows, ctx.config.vocab_size))
        self._ring = ring
        self._scratch = Scratch()
        self._head_weights: dict[int, torch.Tensor] = {}  # of QK-norm, by layer
        # of the cache as it is allocated now
        self._cached: list[torch.Tensor] = []
        self._lines: list[tuple[np.ndarray, np.ndarray]] = []  # of k and v
        # of the step at work, the lists by group
        self._rotations = rotations(ctx.cos_sin, np.zeros(0, np.int32))
        self._writes: list[Writes] = []
        self._plans: list[CpuAttentionPlan] = []
        if ring is None:
            words = np.zeros((RESULT_DEPTH, result_words(ctx.max_rows)), np.int64)
        else:
            words = np.frombuffer(ring.buffer, np.int64).reshape(ring.depth, ring.words_per_step)
        self.results = torch.from_numpy(words)

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())  # the ring's own memory is read-only, which torch warns about

    def begin_attention(
        self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int, num_decode_rows: int | None
    ) -> None:
        cache, host = self.ctx.cache, step.host
        if self._cached is not cache.k:
            self._cached = cache.k
            self._lines = [(as_lines(k), as_lines(v)) for k, v in zip(cache.k, cache.v, strict=True)]
        self._rotations = rotations(self.ctx.cos_sin, host["positions"][:num_tokens])
        block_table = tables.host["block_table"][:, host["row_slots"][:num_rows]]
        seq_lens = host["seq_lens"][:num_rows].tolist()
        starts = host["query_start"][: num_rows + 1].tolist()
        query_lens = [end - begin for begin, end in pairwise(starts)]
        self._writes = [self._written(mapping) for mapping in host["slot_mapping"][:, :num_tokens]]
        self._plans = [
            CpuAttentionPlan(
                block_table[g],
                seq_lens,
                query_lens,
                cache.k[0],
                dtype=self.ctx.dtype,
                window=window,
                scratch=self._scratch,
            )
            for g, window in enumerate(cache.windows)
        ]

    def _written(self, mapping: np.ndarray) -> Writes:
        cache, tokens = self.ctx.cache, None
        if mapping.min() < 0:
            tokens = np.flatnonzero(mapping >= 0)
            mapping = mapping[tokens]
        lines = token_lines(mapping, line_strides(cache.k[0]), cache.block_size, self.ctx.config.num_kv_heads)
        return Writes(lines, tokens)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, step: StepBuffers
    ) -> torch.Tensor:
        c, place = self.ctx.config, self.ctx.cache.places[layer]
        k_lines, v_lines = self._lines[place.tensor]
        weights = None
        if q_norm is not None and k_norm is not None:
            weights = self._head_weights.get(layer)
            if weights is None:
                weights = self._head_weights[layer] = head_weights(q_norm, k_norm, c.num_heads, c.num_kv_heads)
        writes = self._writes[place.group]
        q = rope_kv(qkv, self._rotations, writes, k_lines, v_lines, c.num_heads, weights, c.rms_norm_eps)
        return attend_lines(q, k_lines, v_lines, self._plans[place.group], self.ctx.scale).view(qkv.shape[0], -1)

    def signal(self) -> None:
        if self._ring is not None:
            self._ring.ring_doorbell()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass
