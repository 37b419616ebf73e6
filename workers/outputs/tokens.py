"""Tokens: each row's next token, sampled on the device, which also updates the tables and writes the result words.

Every step has this output, since the core knows by the words that a step has ended: where no row samples, none are drawn and
the words are zeros. Captured steps call `sample`, too (graphs.py).
"""

import numpy as np
import torch

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_SAMPLE, SAMPLING_CUSTOM, SAMPLING_MASK
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.devices.device import Device
from quire.workers.devices.masks import ReadMasks
from quire.workers.logits_processors.batch import CustomProcessors
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.parallel import Parallel

NO_ROWS = np.zeros(0, np.int32)


class Tokens(Output):
    def __init__(
        self,
        device: Device,
        tables: SlotTables,
        buffers: StepBuffers,
        parallel: Parallel,
        vocab_size: int,
        custom_processors: CustomProcessors | None,
        has_head: bool = True,
    ) -> None:
        """has_head: False for a model that computes no logits."""
        self._device, self._tables, self._buffers = device, tables, buffers
        self._parallel, self._vocab_size = parallel, vocab_size
        self._custom_processors = custom_processors
        self._has_head = has_head

    def is_wanted(self, plan: StepPlan) -> bool:
        return True

    def compute(self, step: Computed) -> list[RowResult]:
        plan = step.plan
        if not self._has_head or (plan.wants_vectors and not self._samples_any(plan)):
            self._device.finish(step.device_plan, self._tables, self._buffers, plan.num_samples)
        elif plan.sampling_kind & SAMPLING_CUSTOM:
            self.sample_processed(plan, step.device_plan, step.logits, step.read_masks)
        elif plan.has_mask_rows:
            without = self.load_masks(plan, step.read_masks)
            self.sample(step.device_plan, step.logits, plan.sampling_kind | SAMPLING_MASK, plan.step, without)
        else:
            self.sample(step.device_plan, step.logits, plan.sampling_kind & ~SAMPLING_MASK)
        return []

    def _samples_any(self, plan: StepPlan) -> bool:
        return bool(len(plan.decode_rows)) or bool((plan.prefill_rows["flags"] & PREFILL_SAMPLE).any())

    def sample(
        self, device_plan: torch.Tensor, logits: torch.Tensor, kind: int, step: int = 0, without: np.ndarray = NO_ROWS
    ) -> None:
        """Sample, update the tables, write the results of step `step`; rows `without` their masks get NO_TOKEN."""
        args = (device_plan, logits, self._tables, self._buffers, kind)
        if len(without):
            self._device.sample_without_masks(*args, step, without)
        else:
            self._device.sample(*args)

    def sample_processed(self, plan: StepPlan, device_plan: torch.Tensor, logits: torch.Tensor, read_masks: ReadMasks) -> None:
        """Sample after the operator's own processors have seen the logits of the first plan.num_rows rows; eager.

        They run before masks are read, since reading these gives back the plan's place in the ring."""
        assert self._custom_processors is not None
        logits = self._parallel.all_logits(logits, self._vocab_size)
        processed, failed = self._custom_processors.process(plan, logits, self._buffers.input_ids)
        kind, step = plan.sampling_kind & ~SAMPLING_CUSTOM & ~SAMPLING_MASK, plan.step
        if plan.has_mask_rows:
            kind, failed = kind | SAMPLING_MASK, np.union1d(failed, self.load_masks(plan, read_masks))
        args = (device_plan, logits, self._tables, self._buffers, kind)
        if len(failed):
            self._device.sample_without_masks(*args, step, failed, processed)
        else:
            self._device.sample(*args, processed=processed)

    def load_masks(self, plan: StepPlan, read_masks: ReadMasks) -> np.ndarray:
        """Load the step's masks as they come; returns the rows that should have one and got none."""
        expected = plan.mask_rows.copy()  # reading the next record gives back the plan's place in the ring
        loaded = self._device.masks.load(expected, read_masks(plan), self._buffers.first_sample if plan.window > 1 else None)
        return NO_ROWS if len(loaded) == len(expected) else np.setdiff1d(expected, loaded)
