"""Pipeline: what a stage of a model does around each step. It receives hidden states from the stage before and sends its own to
the next; the last stage sends sampled tokens back to the first, so that the next step of their rows does not wait for the host.

All ranks run all plans in order, so both ends of a link know what travels next and its size, and only tensors are sent. The
first stage receives a step's sampled tokens as late as it can: before a step with decode rows that continue from them (the
plan's `lag`), or when as many steps are due as can be in flight, since the oldest is then done. `Links` (group/) does the
transport. Ranks of equal number in each stage are linked: all ranks of a stage have the same hidden states and tokens.

Called by the runner, around a step's forward and sampling; a model in one stage has no Pipeline.
"""

from collections import deque
from typing import Protocol

import torch

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import STEP_MASK
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.parallel import Stage

STEPS_OF_STAGE = 2  # in flight, for each stage


def max_in_flight(num_stages: int) -> int:
    """The most steps that workers have been given and have not finished."""
    return STEPS_OF_STAGE * num_stages


class Links(Protocol):
    """Links of a rank to its neighbors. A link delivers in order; a sender does not wait for the receiver."""

    def send_hidden(self, x: torch.Tensor) -> None:
        """Send x [T, H] to the next stage; kernels launched after this may overwrite x."""
        ...

    def receive_hidden(self, out: torch.Tensor) -> None:
        """Receive [T, H] from the stage before."""
        ...

    def send_tokens(self, x: torch.Tensor) -> None:
        """Send x, int32 [n], from the last stage to the first."""
        ...

    def receive_tokens(self, n: int) -> torch.Tensor:
        """Receive int32 [n]; valid until the next call."""
        ...


class Pipeline:
    """One rank's receiving and sending. hidden: [most tokens, H], the buffer of the model's input and output."""

    def __init__(self, stage: Stage, links: Links, hidden: torch.Tensor, tables: SlotTables, buffers: StepBuffers) -> None:
        self._stage, self._links, self._hidden = stage, links, hidden
        self._tables, self._buffers = tables, buffers
        self._due: deque[tuple[int, int]] = deque()  # on the first stage: (step, rows) of tokens to receive
        self._most_due = max_in_flight(stage.count)

    def begin(self, plan: StepPlan) -> None:
        """Order the receive of this step's inputs before the kernels launched next."""
        if not self._stage.is_first:
            self._links.receive_hidden(self._hidden[: plan.num_tokens])
            return
        while self._due and (len(self._due) >= self._most_due or self._is_needed(plan, self._due[0][0])):
            self._take_tokens()

    def end(self, plan: StepPlan) -> None:
        """The step's kernels are launched: send its hidden states or tokens to the stage that needs them."""
        rows = plan.num_rows
        if not self._stage.is_last:
            self._links.send_hidden(self._hidden[: plan.num_tokens])
        else:
            slots = self._buffers.row_slots[:rows]
            self._links.send_tokens(torch.cat((slots, self._tables.last_token.index_select(0, slots))))
        if self._stage.is_first:
            self._due.append((plan.step, rows))

    def rest(self) -> bool:
        """While idle: receive the tokens that are due, so that a lost sender is noticed. Returns whether any were due."""
        had_some = bool(self._due)
        while self._due:
            self._take_tokens()
        return had_some

    def _is_needed(self, plan: StepPlan, step: int) -> bool:
        return 0 < plan.lag <= (plan.step - step) & STEP_MASK

    def _take_tokens(self) -> None:
        """Receive the oldest step's tokens. Rows that did not sample send their slots' old tokens, which are never read."""
        _, rows = self._due.popleft()
        received = self._links.receive_tokens(2 * rows)
        self._tables.last_token.index_copy_(0, received[:rows].long(), received[rows:])


def advance(tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
    """Update the tables of a stage that does not sample: only the lengths change."""
    tables.seq_len.index_copy_(0, step.row_slots[:num_rows].long(), step.seq_lens[:num_rows])
