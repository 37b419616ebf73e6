"""The StepContext of a step with one whole sequence, for a model's forward without a runner."""

import torch

from quire.workers.models.step_context import Attend, StepContext, StepStates
from quire.workers.recurrent.state_cache import StateCache


def context_of(attend: Attend, positions: torch.Tensor, states: StateCache | None = None) -> StepContext:
    """positions: int [T], of the one row's tokens, the sequence's first ones. States: number 1 is the row's."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=positions.device)

    given = None if states is None else StepStates(ints(1), ints(0), ints(0), states.tensors)
    return StepContext(attend, positions, ints(0), ints(0, len(positions)), ints(0), 0, given)
