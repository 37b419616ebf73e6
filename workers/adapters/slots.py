"""AdapterSlots: an engine's LoRA adapters on one rank. Owns the device's adapter slots and the copies in host memory.

A load reads this rank's part of an adapter into host memory, unless it is still there by its number, and copies it into a
slot. The core gives a slot to one adapter at a time, and no step uses a slot while it is filled. An adapter with layers that
the slots do not hold (places.py) is refused. loads.py calls `load` from a thread of its own.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from quire.ipc.adapters import AdapterError, AdapterLimits, AdapterPart, AdapterPlan, AdapterTensor
from quire.kernels.lora.tables import RANK_STEP, LoraWeights, round_up
from quire.workers.adapters.experts import LoraExperts
from quire.workers.adapters.lora import CpuStepAdapters, CudaStepAdapters, Piece, StepAdapters
from quire.workers.adapters.peft import identity_of, open_weights
from quire.workers.adapters.places import OneExpert, Places
from quire.workers.models.language_model import LanguageModel
from quire.workers.shard import cut

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HostPart(NamedTuple):
    """This rank's part of what an adapter adds to one layer; a [rank, in], b [out, rank rounded up], in the slots' dtype.

    number: of the weights' own slots among those of an adapter slot; 0 unless it is an expert's.
    """

    weights: LoraWeights
    number: int
    piece: int
    rank: int
    scale: float
    a: torch.Tensor
    b: torch.Tensor


class AdapterSlots:
    def __init__(
        self, model: LanguageModel, limits: AdapterLimits, dtype: torch.dtype, max_tokens: int, device: torch.device
    ) -> None:
        """Makes the slots of `model`, and fills the adapter slots of its layers. max_tokens: of a step."""
        self.limits, self._device = limits, device
        self._dtype = getattr(torch, limits.dtype) if limits.dtype else dtype
        slots, captures = limits.max_loras, limits.captures
        if device.type == "cuda":
            self.steps: StepAdapters = CudaStepAdapters(slots, max_tokens, device, captures)
        else:
            self.steps = CpuStepAdapters(slots, captures)
        self.places = Places(model, limits, self.steps, self._dtype, device)
        model.adapters = self.steps
        self._host: OrderedDict[int, list[HostPart]] = OrderedDict()  # by adapter number, least recently used first
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def host_numbers(self) -> list[int]:
        """Numbers of the adapters in host memory, least recently used first."""
        return list(self._host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on the device."""
        return sum(weights.num_bytes for weights in self.places.layers) // self.limits.max_loras

    # ------------------------------------------------------------------------------------------------------------- loads
    def load(self, number: int, slot: int, plan: AdapterPlan) -> None:
        """Put adapter `number` into a slot, from host memory or from its file. The slot is complete on return.

        Raises AdapterError for an adapter that does not fit the model, and for a file that is not the plan's any more.
        """
        self.keep(number, plan)
        self._put(slot, self._host[number])

    def keep(self, number: int, plan: AdapterPlan) -> None:
        """Have a copy of adapter `number` in host memory. Raises AdapterError as `load` does."""
        if number not in self._host:
            self._host[number] = self._read(plan)
        self._host.move_to_end(number)
        while len(self._host) > max(self.limits.max_cpu_loras, 1):
            self._host.popitem(last=False)

    def forget(self, number: int) -> None:
        """Drop the copy in host memory."""
        self._host.pop(number, None)

    # ------------------------------------------------------------------------------------------------------- from a file
    def _read(self, plan: AdapterPlan) -> list[HostPart]:
        found = [(part, self.places.find(part)) for part in plan.parts]
        descriptor = open_weights(plan.file.folder)
        try:
            self._check_version(descriptor, plan)
            parts = [host for part, place in found for host in self._parts(descriptor, part, place, plan)]
            self._check_version(descriptor, plan)
        finally:
            os.close(descriptor)
        if len({(id(part.weights), part.number, part.piece) for part in parts}) < len(parts):
            raise AdapterError("the adapter has a layer twice, under two names")
        return self._kept(parts)

    def _parts(
        self, descriptor: int, part: AdapterPart, place: Piece | OneExpert | LoraExperts | None, plan: AdapterPlan
    ) -> Iterator[HostPart]:
        if isinstance(place, LoraExperts):
            reading = place.reading(part, plan.peft_version)
            tensors = self._tensor(descriptor, part.a), self._tensor(descriptor, part.b)
            yield from self._of_all_experts(part, place, *place.stacked(reading, *tensors))
        elif isinstance(place, OneExpert):
            inner, hidden = place.experts.place.inner, place.experts.place.hidden
            is_down = place.weights is place.experts.down
            self._check(part, *((inner.full, hidden) if is_down else (hidden, inner.full)))
            if place.number is not None:
                a, b = self._tensor(descriptor, part.a), self._tensor(descriptor, part.b)
                a, b = (a[:, inner.slice], b) if is_down else (a, b[inner.slice])
                yield self._host_part(place.weights, place.number, place.piece, part.scale, a, b)
        elif place is not None:
            self._check(part, place.columns.full, place.rows.full)
            a = self._tensor(descriptor, part.a)[:, place.columns.slice]
            b = cut(self._tensor(descriptor, part.b), place.rows)
            yield self._host_part(place.layer.weights, 0, place.number, part.scale * place.multiplier, a, b)

    def _of_all_experts(
        self, part: AdapterPart, experts: LoraExperts, weights: LoraWeights, a: torch.Tensor, pieces: list[torch.Tensor]
    ) -> Iterator[HostPart]:
        own, inner = experts.place.own, experts.place.inner
        for number, expert in enumerate(range(own.start, own.stop)):
            for piece, b in enumerate(pieces):
                if weights is experts.down:
                    yield self._host_part(weights, number, piece, part.scale, a[expert][:, inner.slice], b[expert])
                else:
                    yield self._host_part(weights, number, piece, part.scale, a[expert], b[expert][inner.slice])

    def _check(self, part: AdapterPart, inputs: int, outputs: int) -> None:
        for tensor, shape in ((part.a, (part.rank, inputs)), (part.b, (outputs, part.rank))):
            if tensor.shape != shape:
                raise AdapterError(f"{tensor.name} has shape {list(tensor.shape)}, but the layer needs {list(shape)}")

    def _host_part(
        self, weights: LoraWeights, number: int, piece: int, scale: float, a: torch.Tensor, b: torch.Tensor
    ) -> HostPart:
        b = pad(b.to(self._dtype), (0, round_up(len(a), RANK_STEP) - len(a)))
        return HostPart(weights, number, piece, len(a), scale, a.to(self._dtype), b)

    def _check_version(self, descriptor: int, plan: AdapterPlan) -> None:
        if identity_of(descriptor, plan.file.folder) != plan.file:
            raise AdapterError("the adapter's file has changed")

    def _tensor(self, descriptor: int, tensor: AdapterTensor) -> torch.Tensor:
        """A tensor of the file. It is read, not mapped: a mapped file that is truncated meanwhile would end the process."""
        data, done = bytearray(tensor.num_bytes), 0
        while done < tensor.num_bytes:
            count = os.preadv(descriptor, [memoryview(data)[done:]], tensor.offset + done)
            if not count:
                raise AdapterError("the adapter's file has changed: it is shorter")
            done += count
        values = torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).view(tensor.shape)
        if not torch.isfinite(values.sum(dtype=torch.float32)):  # a NaN or an infinity stays one in a sum
            raise AdapterError(f"{tensor.name} has values that are not finite numbers")
        return values

    def _kept(self, parts: list[HostPart]) -> list[HostPart]:
        """The same in memory that belongs to them: one pinned buffer for a GPU, since each allocation would hold up steps."""
        count = sum(part.a.numel() + part.b.numel() for part in parts)
        buffer = torch.empty(count, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        at, kept = 0, list[HostPart]()
        for part in parts:
            views = []
            for tensor in (part.a, part.b):
                views.append(buffer[at : at + tensor.numel()].view(tensor.shape).copy_(tensor))
                at += tensor.numel()
            kept.append(part._replace(a=views[0], b=views[1]))
        return kept

    # ------------------------------------------------------------------------------------------------------ to the device
    def _put(self, slot: int, parts: list[HostPart]) -> None:
        if self._stream is None:
            return self._copy(slot, parts)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._copy(slot, parts)
            copied = self._stream.record_event(torch.cuda.Event(blocking=True))
        copied.synchronize()
        return None

    def _copy(self, slot: int, parts: list[HostPart]) -> None:
        per_slot = {id(weights): len(weights.a) // self.limits.max_loras for weights in self.places.layers}
        ranks = {id(w): torch.zeros(per_slot[id(w)], len(w.pieces), dtype=torch.int32) for w in self.places.layers}
        scales = {key: torch.zeros(values.shape) for key, values in ranks.items()}
        for weights, number, piece, rank, scale, a, b in parts:
            own = slot * per_slot[id(weights)] + number
            weights.a_of(own, piece, rank).copy_(a, non_blocking=True)
            weights.b_of(own, piece, rank).copy_(b, non_blocking=True)
            ranks[id(weights)][number, piece], scales[id(weights)][number, piece] = rank, scale
        for weights in self.places.layers:
            count = per_slot[id(weights)]
            own_slots = slice(slot * count, (slot + 1) * count)
            weights.ranks[own_slots].copy_(ranks[id(weights)])
            weights.scales[own_slots].copy_(scales[id(weights)])
