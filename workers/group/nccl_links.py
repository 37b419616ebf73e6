"""Pipeline links between GPUs of several hosts, or without access to each other's memory: NCCL's sends and receives.

NCCL's send ends only when its receiver has come, and computing must not wait for that: so a sent tensor is copied into a slot,
and sent from there on a stream of its own. Two slots of hidden states are enough for a stage to compute while the next one has
not begun; tokens have as many slots as steps can be in flight. A communicator works in the order of its calls: hidden states,
which go from stage to stage, and tokens, which go back, have one each, so that neither waits for the other. The worker's loop
watches every wait (`Device.waited_s`), as in other exchanges.
"""

import torch
import torch.distributed as dist

from quire.workers.group.place import ExchangeFailed, Place, first_sentence
from quire.workers.pipeline import max_in_flight

HIDDEN_SLOTS = 2


class NcclLinks:
    def __init__(self, place: Place, max_tokens: int, hidden_size: int, dtype: torch.dtype, max_rows: int) -> None:
        """All ranks call this together, for steps up to this size. Raises ExchangeFailed."""
        self._device = place.device
        behind, before = place.in_stage(place.stage + 1), place.in_stage(place.stage - 1)
        first, last = place.in_stage(0), place.in_stage(-1)
        hidden = torch.zeros(HIDDEN_SLOTS, max_tokens * hidden_size, dtype=dtype, device=place.device)
        tokens = torch.zeros(max_in_flight(place.stages), 2 * max_rows, dtype=torch.int32, device=place.device)
        try:
            self._hidden = _Link(hidden, behind, before)
            self._tokens = _Link(tokens, first, last)
            self._connect(place)
        except RuntimeError as error:
            raise ExchangeFailed(f"NCCL cannot connect the stages: {first_sentence(error)}") from error

    def _connect(self, place: Place) -> None:
        """Connect the ranks now, one stage after the other: NCCL would otherwise connect two ranks in the first step."""
        word = torch.zeros(1, dtype=torch.int32, device=place.device)
        for link, sends, receives in (
            (self._hidden, place.stage < place.stages - 1, place.stage > 0),
            (self._tokens, place.stage == place.stages - 1, place.stage == 0),
        ):
            if receives:
                link.receive(word.to(link.dtype))
            if sends:
                link.send(word.to(link.dtype))
        torch.cuda.synchronize(place.device)

    def send_hidden(self, x: torch.Tensor) -> None:
        self._hidden.send(x)

    def receive_hidden(self, out: torch.Tensor) -> None:
        self._hidden.receive(out)

    def send_tokens(self, x: torch.Tensor) -> None:
        self._tokens.send(x)

    def receive_tokens(self, n: int) -> torch.Tensor:
        out = torch.empty(n, dtype=torch.int32, device=self._device)
        self._tokens.receive(out)
        return out


class _Link:
    """One direction, on its own communicator, which all ranks create. slots: [num_slots, most elements of a message]."""

    def __init__(self, slots: torch.Tensor, to: int, by: int) -> None:
        self.dtype = slots.dtype
        self._slots, self._to, self._by = slots, to, by
        self._group = dist.new_group()
        self._stream = torch.cuda.Stream(slots.device)
        self._left = [torch.cuda.Event() for _ in slots]
        self._turn = 0

    def send(self, x: torch.Tensor) -> None:
        """Send x, contiguous; kernels launched after this may overwrite it."""
        number = self._turn % len(self._slots)
        self._turn += 1
        slot, here = self._slots[number, : x.numel()], torch.cuda.current_stream(x.device)
        here.wait_event(self._left[number])  # the slot's last message was sent; returns at once before the first
        slot.copy_(x.reshape(-1))
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            dist.send(slot, self._to, group=self._group)
            self._left[number].record(self._stream)

    def receive(self, out: torch.Tensor) -> None:
        dist.recv(out.view(-1), self._by, group=self._group)
