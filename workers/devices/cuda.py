"""A GPU as a device: Triton kernels, pinned staging, results in mapped memory, and a completion thread.

Nothing on the decode path waits for the GPU: a plan is one asynchronous copy, and the GPU itself writes the sampled ids into
the result ring's memory, which is registered with CUDA. A completion thread waits for each step's event and wakes the core.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager

import numpy as np
import torch

from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER, result_words
from quire.kernels.experts import experts
from quire.kernels.linear import fixed, scaled, split_linear
from quire.kernels.sampling import sampler, sampler_sharded
from quire.kernels.speculation import accept, draft_passes, features, ngram
from quire.kernels.step import step_inputs, step_states
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.kernels.tuning.current import current
from quire.workers.attention.cuda import CudaModelAttention
from quire.workers.devices.device import RESULT_DEPTH, Device, DeviceContext
from quire.workers.devices.masks import CudaMasks
from quire.workers.pipeline import max_in_flight

log = logging.getLogger("quire.workers")

DEVICE_WORDS = HEADER.at["device_words"]


class CudaDevice(Device):
    def __init__(self, ctx: DeviceContext, ring: ResultRing | None):
        masks = CudaMasks(ctx.sampled_rows, ctx.config.vocab_size, ctx.device)
        modules = step_inputs, step_states, sampler, sampler_sharded, accept, ngram, draft_passes, features
        super().__init__(ctx, *modules, masks, ring)
        self._stream = torch.cuda.Stream(ctx.device)
        self.plan = torch.zeros(ctx.max_device_words, dtype=torch.int32, device=ctx.device)
        depth = 2 * max_in_flight(ctx.parallel.stage.count)  # at most half of these plans are being copied
        self._staging = [torch.zeros(ctx.max_device_words, dtype=torch.int32).pin_memory() for _ in range(depth)]
        self._staging_views = [s.numpy() for s in self._staging]
        self._turn = 0
        self.results = _mapped_results(ring) if ring is not None else _private_results(ctx)
        self._waiting_since: float | None = None  # since when the completion thread has waited for the oldest step
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._completion = threading.Thread(target=self._complete, name="completion", daemon=True)
        self._completion.start()

    def load_plan(self, words: np.ndarray) -> torch.Tensor:
        """One asynchronous copy to the plan's place on the device, the same every step."""
        n, self._turn = int(words[DEVICE_WORDS]), (self._turn + 1) % len(self._staging)  # the other sections stay on the host
        self._staging_views[self._turn][:n] = words[:n]
        self.plan[:n].copy_(self._staging[self._turn][:n], non_blocking=True)
        return self.plan

    def kernel_specialization(self, num_tokens: int) -> Hashable:
        """Numbers of tokens with equal values here run the same compiled kernels, attention left aside."""
        ranks = self.ctx.parallel.size
        exchange = current().exchange.kernel(ranks, num_tokens) if ranks > 1 else None
        specs = {layer.experts for layer in self.ctx.config.layers if layer.experts is not None}
        pairs = {(e.weighs_input, e.routing.top_k, e.routing.num_experts) for e in specs}
        by_experts = {
            (experts.kernel_specialization(num_tokens, k, n), weighs and experts.kernel_specialization(num_tokens * k, 1, n))
            for weighs, k, n in pairs
        }
        few, many = split_linear.kernel_specialization(num_tokens), scaled.kernel_specialization(num_tokens)
        return mode_for(num_tokens), few, many, frozenset(by_experts), exchange, fixed.kernel_specialization(num_tokens)

    def new_attention(self, ctx: DeviceContext) -> CudaModelAttention:
        return CudaModelAttention(ctx)

    def signal(self) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        self._events.put(event)

    def _complete(self) -> None:
        while (event := self._events.get()) is not None:
            self._waiting_since = time.monotonic()
            try:
                event.synchronize()
            except RuntimeError:
                # This process cannot use the device any more. Its main thread waits for the next plan and the core for this
                # step's result: if the process ends, the core learns of it before the step's time limit.
                log.exception("a step failed on the GPU")
                os._exit(1)
            self._waiting_since = None
            if self._ring is not None:
                self._ring.ring_doorbell()

    def waited_s(self) -> float:
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def is_idle(self) -> bool:
        """Whether the device has done all work given to it."""
        return self._stream.query()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        if self.is_idle():  # else copies are under way, and the memory is released when the process ends
            self.masks.close()
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
    """A buffer for the results of ranks other than the output rank; it is never read."""
    words = result_words(ctx.max_rows, max_samples=ctx.max_samples)
    return torch.zeros((RESULT_DEPTH, words), dtype=torch.int64, device=ctx.device)
