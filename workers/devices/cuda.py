"""A GPU as a device: Triton kernels, pinned staging, results in mapped memory, and a completion thread.

Nothing on the decode path waits for the GPU: a plan is one asynchronous copy, the sampled ids are written by the GPU itself
into the result ring's memory, which is registered with CUDA. The completion thread waits for each step's event and rings the
core, if it sleeps.
"""

import logging
import os
import queue
import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager

import numpy as np
import torch

from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER
from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_rope import Rope, can_fuse
from quire.kernels.attention.decode_schedule import DecodeSchedule, DecodeWorkspace, decode_schedule
from quire.kernels.attention.prefill import prefill_attention
from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule
from quire.kernels.attention.rope_kv import choose_tile, rope_kv
from quire.kernels.linear import split_linear
from quire.kernels.sampling import sampler
from quire.kernels.step import step_inputs
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.workers.devices.device import RESULT_DEPTH, Device, DeviceContext, result_words
from quire.workers.devices.masks import CudaMasks

log = logging.getLogger("quire.workers")

DEVICE_WORDS = HEADER.at["device_words"]
STAGING_DEPTH = 4  # plans whose copy may be under way; the core has at most two steps in flight
MAX_QUERY_LEN = 1  # query tokens of a decode row


class CudaDevice(Device):
    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        super().__init__(ctx, step_inputs, sampler, CudaMasks(ctx.max_rows, ctx.config.vocab_size, ctx.device))
        c = ctx.config
        self._ring = ring
        self._stream = torch.cuda.Stream(ctx.device)
        self.plan = torch.zeros(ctx.max_device_words, dtype=torch.int32, device=ctx.device)
        self._staging = [torch.zeros(ctx.max_device_words, dtype=torch.int32).pin_memory() for _ in range(STAGING_DEPTH)]
        self._staging_views = [s.numpy() for s in self._staging]
        self._turn = 0
        self.results = _mapped_results(ring) if ring is not None else _private_results(ctx)
        shape = (c.num_heads, c.num_kv_heads, c.head_dim)
        self._decode = DecodeWorkspace.allocate(ctx.max_rows, *shape, MAX_QUERY_LEN, ctx.device, ctx.dtype)
        self._schedules: list[DecodeSchedule] = [self._decode.new_schedule(w) for w in ctx.cache.windows]
        self._prefill = PrefillWorkspace.allocate(ctx.max_rows, ctx.max_tokens, *shape, ctx.device, ctx.dtype)
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._completion = threading.Thread(target=self._complete, name="completion", daemon=True)
        self._completion.start()

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        """One asynchronous copy to the plan's place on the device, the same every step."""
        n, self._turn = int(words[DEVICE_WORDS]), (self._turn + 1) % STAGING_DEPTH  # the other sections stay here
        self._staging_views[self._turn][:n] = words[:n]
        self.plan[:n].copy_(self._staging[self._turn][:n], non_blocking=True)
        return self.plan

    def kernel_variant(self, num_tokens: int, num_rows: int) -> Hashable:
        """Mixed steps of padded sizes with equal variants run the same compiled kernels."""
        products = split_linear.kernel_variant(num_tokens)
        return mode_for(num_tokens), self._decode.launch(num_rows), choose_tile(num_tokens), products

    def begin_attention(
        self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int, num_decode_rows: int | None
    ) -> None:
        # a mixed step gives all rows to both kernels, and they part them by what the device says: a graph must not depend on
        # the mix, and a slice from an odd row on would be another alignment, for which Triton compiles anew
        mixed = num_decode_rows is None or 0 < num_decode_rows < num_rows
        limit = step.num_decode_rows if mixed else None
        max_keys = self.ctx.max_blocks * self.ctx.cache.block_size
        self._tables, self._rows = tables, step.row_slots[:num_rows]
        self._lengths = (step.query_start[: num_rows + 1], step.seq_lens[:num_rows])
        self._has_decode, self._has_prefill = mixed or num_decode_rows == num_rows, mixed or num_decode_rows == 0
        if self._has_decode:
            for schedule in self._schedules:
                decode_schedule(self._decode, schedule, *self._lengths, num_tokens, max_keys, limit)
        if self._has_prefill:
            windows = self.ctx.cache.windows
            window = max(windows) if all(windows) else 0
            prefill_schedule(self._prefill, *self._lengths, num_tokens, max_keys, limit, window=window)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, step: StepBuffers
    ) -> torch.Tensor:
        c, cache = self.ctx.config, self.ctx.cache
        place = cache.places[layer]
        k, v, t = cache.k[place.tensor], cache.v[place.tensor], qkv.shape[0]
        mapping = step.slot_mapping[place.group, :t]
        pdl = mode_for(t)
        cos_sin, rope = self.ctx.cos_sin, None
        # one row, and QK-norm, take less time with rotation and KV write in a kernel of their own (benchmarks/LOG.md)
        if not self._has_prefill and t > 1 and q_norm is None and can_fuse(self._decode, k, cos_sin):
            rope = Rope(qkv, cos_sin, mapping)
        else:
            eps = c.rms_norm_eps
            rope_kv(qkv, step.positions[:t], cos_sin, mapping, k, v, c.num_heads, q_norm, k_norm, eps, pdl=pdl)
        q = qkv[:, : c.num_heads * c.head_dim].unflatten(1, (c.num_heads, c.head_dim))
        out = torch.empty(t, c.num_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)
        table, scale = self._tables.block_table[place.group], self.ctx.scale
        rows, lengths = self._rows, self._lengths
        if self._has_decode:
            schedule = self._schedules[place.group]
            decode_attention(
                *(q, k, v, table, rows, *lengths, out),
                scale=scale,
                workspace=self._decode,
                schedule=schedule,
                rope=rope,
                dependent_launch=pdl,
            )
        if self._has_prefill:
            window = cache.windows[place.group]
            prefill_attention(q, k, v, table, rows, *lengths, out, scale=scale, workspace=self._prefill, window=window)
        return out.view(t, -1)

    def signal(self) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        self._events.put(event)

    def _complete(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event.synchronize()
            except RuntimeError:
                # The device is lost to this process. Its main thread waits for the next plan, the core for this step's result:
                # only our end tells them before the step's time is up.
                log.exception("a step failed on the GPU")
                os._exit(1)
            if self._ring is not None:
                self._ring.ring_doorbell()

    def is_idle(self) -> bool:
        """Whether all that was given to the device is done."""
        return self._stream.query()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        self._events.put(None)


def _mapped_results(ring: ResultRing) -> torch.Tensor:
    """The result ring's words as a tensor that the GPU can write to: int64 [depth, words_per_step]."""
    words = np.frombuffer(ring.buffer, np.int64).reshape(ring.depth, ring.words_per_step)
    tensor = torch.from_numpy(words)
    cudart = torch.cuda.cudart()
    portable_and_mapped = 3
    error = cudart.cudaHostRegister(tensor.data_ptr(), tensor.numel() * 8, portable_and_mapped)
    if int(error) != 0:
        raise RuntimeError(f"the result ring's memory cannot be registered with CUDA (error {int(error)})")
    return tensor


def _private_results(ctx: DeviceContext) -> torch.Tensor:
    """Where ranks other than the output rank write: nobody reads it."""
    return torch.zeros((RESULT_DEPTH, result_words(ctx.max_rows)), dtype=torch.int64, device=ctx.device)
