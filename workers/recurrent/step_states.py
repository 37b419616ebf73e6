"""RecurrentStates: what the runner does with recurrent states in a step: nothing in a stage without recurrent layers."""

from types import ModuleType

import numpy as np
import torch

from quire.ipc.step.plan import DTYPES
from quire.kernels.step.tables import SlotTables, StateRows, StepBuffers
from quire.workers.models.step_context import StepStates
from quire.workers.recurrent.state_cache import StateCache


class RecurrentStates:
    """module: step_states or step_states_cpu, of the device."""

    def __init__(self, cache: StateCache, module: ModuleType, max_rows: int, device: torch.device):
        self._cache, self._module = cache, module
        self._rows = StateRows.allocate(max_rows, device)

    def begin(self, plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int) -> StepStates | None:
        """The states of a step's rows, padded to num_rows; its inputs are built."""
        if not self._cache.state_bytes:
            return None
        rows = self._rows
        rows.num_states = self._cache.num_states
        self._module.prepare_states(plan, tables, step, rows, num_rows)
        return StepStates(rows.own[:num_rows], rows.first[:num_rows], rows.last[:num_rows], self._cache.tensors)

    def copy(self, copies: np.ndarray) -> None:
        """Copy states as the plan's section says, in order, before the step's forward. copies: [n], fields of STATE_COPY."""
        if self._cache.state_bytes:
            for source, target in copies.view(DTYPES["state_copies"]).tolist():
                self._cache.copy(source, target)
