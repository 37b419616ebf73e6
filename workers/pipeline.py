"""Pipeline: what a stage of a model does around each step. It takes hidden states from the stage before, and gives its own to
the next; tokens that the last one samples return to the first, so that the next step of their rows does not wait for the host.

All ranks get all plans and run them in order, so both ends of a link count alike: nothing but tensors travels. The first stage
takes sampled tokens as late as it can: before a step whose decode rows go on from them (the plan's `lag`), and before they are
as old as steps in flight can be, which are done. What travels, and how, is `Links`' business (group/). One row of a rank's is
linked to the same rank of other stages: ranks of a stage hold the same hidden states and sample the same tokens.

Called by the runner, around a step's forward and sampling; there is none of a model in one piece.
"""

from collections import deque
from typing import Protocol

import torch

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import STEP_MASK
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.parallel import Stage

STEPS_OF_STAGE = 2  # in flight


def max_in_flight(num_stages: int) -> int:
    """Steps that the workers may have been given and not have done."""
    return STEPS_OF_STAGE * num_stages


class Links(Protocol):
    """What connects a rank with its neighbours. A link keeps its order; who sends does not wait for who receives."""

    def send_hidden(self, x: torch.Tensor) -> None:
        """x [T, H] to the next stage; it may be overwritten by what is launched next."""
        ...

    def receive_hidden(self, out: torch.Tensor) -> None:
        """[T, H] of the stage before."""
        ...

    def send_tokens(self, x: torch.Tensor) -> None:
        """x int32 [n], of the last stage to the first."""
        ...

    def receive_tokens(self, n: int) -> torch.Tensor:
        """int32 [n]; valid until the next call."""
        ...


class Pipeline:
    """Of one rank. hidden: [most tokens, H], what the model receives and leaves."""

    def __init__(self, stage: Stage, links: Links, hidden: torch.Tensor, tables: SlotTables, buffers: StepBuffers) -> None:
        self._stage, self._links, self._hidden = stage, links, hidden
        self._tables, self._buffers = tables, buffers
        self._due: deque[tuple[int, int]] = deque()  # steps whose tokens come back, and their rows: the first stage's
        self._most_due = max_in_flight(stage.count)

    def begin(self, plan: StepPlan) -> None:
        """What the step needs of others is there, for what is launched from now on."""
        if not self._stage.is_first:
            self._links.receive_hidden(self._hidden[: plan.num_tokens])
            return
        while self._due and (len(self._due) >= self._most_due or self._is_needed(plan, self._due[0][0])):
            self._take_tokens()

    def end(self, plan: StepPlan) -> None:
        """The step is computed, by what is launched so far: pass on what others need of it."""
        rows = plan.num_rows
        if not self._stage.is_last:
            self._links.send_hidden(self._hidden[: plan.num_tokens])
        else:
            slots = self._buffers.row_slots[:rows]
            self._links.send_tokens(torch.cat((slots, self._tables.last_token.index_select(0, slots))))
        if self._stage.is_first:
            self._due.append((plan.step, rows))

    def rest(self) -> bool:
        """There is nothing to do: take the tokens that are due, so that it is seen if none come. Whether there were any."""
        had_some = bool(self._due)
        while self._due:
            self._take_tokens()
        return had_some

    def _is_needed(self, plan: StepPlan, step: int) -> bool:
        return 0 < plan.lag <= (plan.step - step) & STEP_MASK

    def _take_tokens(self) -> None:
        """Those of rows that have not sampled are their slots' old ones, which nobody reads."""
        _, rows = self._due.popleft()
        received = self._links.receive_tokens(2 * rows)
        self._tables.last_token.index_copy_(0, received[:rows].long(), received[rows:])


def advance(tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
    """What a step changes in the tables of stages that do not sample: lengths."""
    tables.seq_len.index_copy_(0, step.row_slots[:num_rows].long(), step.seq_lens[:num_rows])
