"""KeptInputs: what recurrent layers keep of decode rows with windows, until it is known which of their tokens count.

The next step of a row applies what was accepted (kernels/recurrent/rows.py, Windows). Where a sequence is in no row that does
so, the core says that it is applied before the step, by the layers themselves: because the sequence waits for its turn, because
the step has no windows, or because the sequence has ended and its state is worth keeping.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.ipc.step.plan import DTYPES
from quire.kernels.recurrent.rows import Windows
from quire.kernels.step.tables import KeptTables, SlotTables, StepBuffers
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepContext, StepStates
from quire.workers.recurrent.state_cache import StateCache


class KeptInputs:
    """module: step_states or step_states_cpu, of the device. max_samples: of a step with windows."""

    def __init__(self, cache: StateCache, module: ModuleType, num_slots: int, max_samples: int, device: torch.device):
        self._cache, self._module = cache, module
        self.tables = KeptTables.allocate(num_slots, max_samples, device)
        self._inputs = cache.new_kept(2 * max_samples, device)

    def begin(self, plan: torch.Tensor) -> None:
        """A step's inputs are built."""
        self._module.begin_kept(plan, self.tables)

    def end(self, step: StepBuffers, num_rows: int) -> None:
        """It is known which samples of a step with windows count."""
        self._module.end_kept(step, self.tables, num_rows)

    def windows(self, layer: int, slots: torch.Tensor, tables: SlotTables) -> Windows:
        """Facts about rows with these slots for a layer."""
        t = self.tables
        of_slots = t.num_kept, t.first_kept, tables.seq_len, t.keep_at, t.keep_state
        return Windows(slots, *of_slots, t.base, self._inputs[layer])

    def apply(self, words: np.ndarray, tables: SlotTables, model: nn.Module) -> None:
        """Do what the plan's section says, before anything else of the step. words: [n], fields of KEPT_INPUTS."""
        records = words.view(DTYPES["kept_inputs"])
        said = records[records["keep_at"] >= 0]
        if len(said):
            columns = np.stack([said[name] for name in ("slot", "keep_at", "state")])
            slots, keep_at, states = self._on_device(columns)
            self.tables.keep_at.index_copy_(0, slots.long(), keep_at)
            self.tables.keep_state.index_copy_(0, slots.long(), states.clamp(0, self._cache.num_states - 1))
        applied = records["slot"][records["applies"] == 1]
        if len(applied):
            self.apply_now(self._on_device(applied), tables, model)

    def apply_now(self, slots: torch.Tensor, tables: SlotTables, model: nn.Module) -> None:
        """Apply what is kept of sequences to their states. slots: int32 [n], on the device."""
        count, nothing = len(slots), torch.zeros_like(slots)
        own = tables.column("state").index_select(0, slots.long()).clamp(0, self._cache.num_states - 1)
        states = StepStates(own, own, nothing, self._cache.tensors, lambda layer: self.windows(layer, slots, tables))
        starts, limit = slots.new_zeros(count + 1), slots.new_full((1,), count)
        context = StepContext(_no_attention, slots.new_zeros(1), slots, starts, limit, count, states)
        for layer in model.modules():
            if isinstance(layer, RecurrentLayer):
                layer.apply_kept(context)
        self.tables.num_kept.index_fill_(0, slots.long(), 0)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        host, device = torch.from_numpy(np.array(values, np.int32)), self.tables.num_kept.device
        if device.type == "cuda":  # a copy from pageable memory would wait for the GPU
            return host.pin_memory().to(device, non_blocking=True)
        return host


def _no_attention(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("what is kept is applied to states alone")
