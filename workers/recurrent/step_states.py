"""RecurrentStates: what the runner does with recurrent states in a step: nothing in a stage without recurrent layers."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from torch import nn

from quire.ipc.step.plan import DTYPES
from quire.kernels.step.tables import SlotTables, StateRows, StepBuffers
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepStates
from quire.workers.recurrent.kept_inputs import KeptInputs
from quire.workers.recurrent.state_cache import StateCache


class RecurrentStates:
    """module: step_states or step_states_cpu, of the device. max_samples: of a step with windows; 0: there are none."""

    def __init__(self, cache: StateCache, module: ModuleType, max_rows: int, max_samples: int, device: torch.device):
        self._cache, self._module = cache, module
        self._rows = StateRows.allocate(max(max_rows, max_samples), device)
        keeps = cache.state_bytes and max_samples
        self.kept = KeptInputs(cache, module, max_rows + 1, max_samples, device) if keeps else None

    def begin(
        self, plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int, windows: bool
    ) -> StepStates | None:
        """The states of a step's rows, padded to num_rows; its inputs are built. windows: decode rows have windows."""
        if not self._cache.state_bytes:
            return None
        rows, kept, of_layer = self._rows, self.kept, None
        rows.num_states = self._cache.num_states
        self._module.prepare_states(plan, tables, step, rows, num_rows)
        if kept is not None:
            kept.begin(plan)
        if kept is not None and windows:
            of_layer = lambda layer: kept.windows(layer, step.row_slots[:num_rows], tables)  # noqa: E731
        return StepStates(rows.own[:num_rows], rows.first[:num_rows], rows.last[:num_rows], self._cache.tensors, of_layer)

    def end(self, step: StepBuffers, num_rows: int) -> None:
        """It is known which samples of a step with windows count."""
        if self.kept is not None:
            self.kept.end(step, num_rows)

    def appliers(self, tables: SlotTables, model: nn.Module) -> dict[str, Callable[[np.ndarray], None]]:
        """Functions that apply a plan's sections about states, in this order, before the step's inputs are built."""
        kept, found = self.kept, dict[str, Callable[[np.ndarray], None]]()
        if kept is not None:
            layers = _recurrent_layers(model)
            found["kept_inputs"] = lambda words: kept.apply(words, tables, layers)
        return found | {"state_copies": self.copy}

    def apply_nothing(self, tables: SlotTables, model: nn.Module) -> None:
        """Run the kernels that apply what is kept, for the dummy slot: a warm-up. Few rows have other programs than many."""
        if self.kept is None:
            return
        for count in (1, tables.max_num_seqs):
            dummies = tables.seq_len.new_full((count,), tables.max_num_seqs)
            self.kept.apply_now(dummies, tables, _recurrent_layers(model))

    def copy(self, copies: np.ndarray) -> None:
        """Copy states as the plan's section says, in order, before the step's forward. copies: [n], fields of STATE_COPY."""
        if self._cache.state_bytes:
            for source, target in copies.view(DTYPES["state_copies"]).tolist():
                self._cache.copy(source, target)


def _recurrent_layers(model: nn.Module) -> list[RecurrentLayer]:
    return [module for module in model.modules() if isinstance(module, RecurrentLayer)]
