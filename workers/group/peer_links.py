"""Pipeline links between the GPUs of one host: each accesses the others' memory (kernels/exchange/peer_link.py).

Each rank has one allocation of the same layout: counters, slots for hidden states, slots for sampled tokens. Two slots of
hidden states are enough for a stage to compute while the next one has not begun; tokens have as many slots as steps can be in
flight, so the last stage never waits for the first.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from quire.kernels.exchange.peer_link import Receiver, Sender, receive, send
from quire.workers.group.cuda import PATIENCE, all_agree, new_shared
from quire.workers.group.place import Place
from quire.workers.pipeline import max_in_flight

LINE = 128  # bytes: each counter has a line of its own; the slots are aligned to it
HIDDEN_SLOTS = 2
# lines of the counters; each counter is in the memory of the rank that waits for it
HIDDEN_ARRIVED, HIDDEN_TAKEN, TOKENS_ARRIVED, TOKENS_TAKEN = range(4)
COUNTERS_BYTES = 4 * LINE


class PeerLinks:
    def __init__(self, place: Place, max_tokens: int, token_bytes: int, max_rows: int) -> None:
        """All ranks call this together, for steps up to this size. token_bytes: size of a token's hidden state."""
        hidden_bytes, tokens_bytes = _aligned(max_tokens * token_bytes), _aligned(2 * 4 * max_rows)
        unit = 4 if token_bytes % 16 == 0 else 1
        token_slots = max_in_flight(place.stages)
        sizes = COUNTERS_BYTES, HIDDEN_SLOTS * hidden_bytes, token_slots * tokens_bytes
        self._memory = new_shared((sum(sizes),), torch.uint8, place.device)
        self._memory[:COUNTERS_BYTES].zero_()
        torch.cuda.synchronize(place.device)
        self._handle = symm_mem.rendezvous(self._memory, dist.group.WORLD)  # type: ignore[arg-type]
        bases = list(self._handle.buffer_ptrs)
        all_agree(True, place.device)  # so that all counters are zero before a rank counts
        before, behind = bases[place.in_stage(place.stage - 1)], bases[place.in_stage(place.stage + 1)]
        first, last = bases[place.in_stage(0)], bases[place.in_stage(-1)]
        hidden_at, tokens_at = sizes[0], sizes[0] + sizes[1]
        limit_ns, line = int(PATIENCE * place.timeout_s * 1e9), self._counter
        hidden, tokens = self._memory[hidden_at:tokens_at], self._memory[tokens_at:]
        self._hidden_out = Sender(
            line(HIDDEN_TAKEN), behind + HIDDEN_ARRIVED * LINE, behind + hidden_at, HIDDEN_SLOTS, hidden_bytes, unit, limit_ns
        )
        self._hidden_in = Receiver(
            line(HIDDEN_ARRIVED), before + HIDDEN_TAKEN * LINE, hidden.view(HIDDEN_SLOTS, hidden_bytes), limit_ns
        )
        self._tokens_out = Sender(
            line(TOKENS_TAKEN), first + TOKENS_ARRIVED * LINE, first + tokens_at, token_slots, tokens_bytes, 1, limit_ns
        )
        self._tokens_in = Receiver(
            line(TOKENS_ARRIVED), last + TOKENS_TAKEN * LINE, tokens.view(token_slots, tokens_bytes), limit_ns
        )
        self._turns = [0, 0, 0, 0]  # hidden states sent and received, tokens sent and received

    def send_hidden(self, x: torch.Tensor) -> None:
        send(x, self._turn(0), self._hidden_out)

    def receive_hidden(self, out: torch.Tensor) -> None:
        receive(out, self._turn(1), self._hidden_in)

    def send_tokens(self, x: torch.Tensor) -> None:
        send(x, self._turn(2), self._tokens_out)

    def receive_tokens(self, n: int) -> torch.Tensor:
        out = torch.empty(n, dtype=torch.int32, device=self._memory.device)
        receive(out, self._turn(3), self._tokens_in)
        return out

    def _turn(self, which: int) -> int:
        self._turns[which] += 1
        return self._turns[which] - 1

    def _counter(self, number: int) -> torch.Tensor:
        return self._memory[number * LINE : number * LINE + 4].view(torch.int32)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
