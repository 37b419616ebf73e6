"""CustomProcessors: runs the operator's logits processors: the batch that they see, and what happens if one fails.

They see a batch of their own: those rows of a step that sample and belong to requests that take part. As in vLLM, its order
stays from step to step, and a BatchUpdate reports which requests left or came. Processors get the model's logits as float32,
before penalties, temperature, and masks, and return changed ones; reported log-probabilities are those of the model. Such a
step waits for the device, since a request's list of output ids must contain the last one.

If a processor raises, each request of the batch is run again alone, with a new instance of the class; a request that fails
again gets no token. An instance that has raised is never used again. Called by the runner.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quire.ipc.messages.workers import ProcessorsInfo
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.custom_processors import decode_records
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_SAMPLE
from quire.workers.logits_processors.interface import LogitsProcessor
from quire.workers.logits_processors.load import ProcessorError, interface_in_use, reason

log = logging.getLogger("quire.workers")

MAX_TRIED_ALONE = 64  # requests of one batch; the rest fail
FAILURES = (Exception, SystemExit)  # of the operator's code


class ProcessedSequence:
    """One sequence that the processors see; they may read its lists."""

    __slots__ = ("output_ids", "params", "prompt_ids")

    def __init__(self, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids


class Processor:
    """One class and its current instance, which is None after a failure until the next step makes another."""

    def __init__(self, kind: type, make: Callable[[], Any]) -> None:
        self.name = f"{kind.__module__}:{kind.__qualname__}"
        self.kind = kind
        self.make = make
        try:
            self.instance: Any = make()
            self.is_argmax_invariant = bool(self.instance.is_argmax_invariant())
        except FAILURES as error:
            raise ProcessorError(f"--logits-processors {self.name}: it cannot be made: {reason(error)}") from error

    def check(self, params: SamplingParams) -> str:
        """Why a request's params are refused; "" if they are not."""
        validate = getattr(self.kind, "validate_params", None)
        try:
            if validate is not None:
                validate(params)
        except ValueError as error:
            return str(error) or "extra_args: a logits processor refuses them"
        except FAILURES:
            log.exception("%s.validate_params failed", self.name)
            return "extra_args: a logits processor failed to check them"
        return ""


class CustomProcessors:
    """All processors of one worker. vllm_config: passed to their constructors. Raises ProcessorError."""

    def __init__(self, kinds: Sequence[type], vllm_config: Any, device: torch.device) -> None:
        pins = device.type == "cuda"
        made = [Processor(kind, lambda kind=kind: kind(vllm_config, device, pins)) for kind in kinds]  # type: ignore[misc]
        self._processors = sorted(made, key=lambda p: p.is_argmax_invariant)  # these run last: they see the temperature
        self._known: dict[int, ProcessedSequence] = {}  # by slot
        self._batch: list[ProcessedSequence] = []  # of the last step that had a batch

    @property
    def info(self) -> ProcessorsInfo:
        own = LogitsProcessor.validate_params.__func__  # type: ignore[attr-defined]
        checks = [getattr(p.kind, "validate_params", None) for p in self._processors]
        return ProcessorsInfo(
            all_requests=any(getattr(p.kind, "all_requests", False) for p in self._processors),
            checks_params=any(check is not None and getattr(check, "__func__", None) is not own for check in checks),
        )

    def check(self, params: SamplingParams) -> str:
        """Why one of the classes refuses a request; "" if none does."""
        return next(filter(None, (processor.check(params) for processor in self._processors)), "")

    def begin_step(self, plan: StepPlan) -> None:
        """Forget the sequences of slots that the plan gives to others."""
        if self._known:
            for slot in plan.section("slot_updates")["slot"].tolist():
                self._known.pop(slot, None)

    def take_in(self, words: np.ndarray) -> None:
        """Add the sequences of the plan section's records."""
        for record in decode_records(words):
            sequence = ProcessedSequence(record.params, record.prompt_ids.tolist(), record.output_ids.tolist())
            self._known[record.slot] = sequence

    # ------------------------------------------------------------------------------------------------------- a step
    def process(self, plan: StepPlan, logits: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Logits [rows, V] to sample from, and the rows that get no token, int32. input_ids: those of the step."""
        row_of, slot_of = self._rows(plan, input_ids)
        update = self._move_batch(list(row_of))
        if not self._batch:
            return logits, np.zeros(0, np.int32)
        rows = torch.tensor([row_of[member] for member in self._batch], device=logits.device)
        part, failed = self._apply_all(logits.index_select(0, rows).float(), update)
        processed = logits.index_copy(0, rows, part.to(logits.dtype))
        for i in failed:
            self._known.pop(slot_of[self._batch[i]], None)
        return processed, np.asarray(sorted(row_of[self._batch[i]] for i in failed), np.int32)

    def _rows(
        self, plan: StepPlan, input_ids: torch.Tensor
    ) -> tuple[dict[ProcessedSequence, int], dict[ProcessedSequence, int]]:
        """Row and slot of each sequence that takes part and samples. A decode row's input is the token that it sampled last."""
        decode, prefill = plan.decode_rows.tolist(), plan.prefill_rows
        slots = [(row, slot) for row, slot in enumerate(decode) if slot in self._known]
        if slots:
            last = input_ids[: len(decode)].tolist()
            for row, slot in slots:
                self._known[slot].output_ids.append(last[row])
        for i, (slot, flags) in enumerate(zip(prefill["slot"].tolist(), prefill["flags"].tolist(), strict=True)):
            if flags & PREFILL_SAMPLE and slot in self._known:
                slots.append((len(decode) + i, slot))
        return {self._known[slot]: row for row, slot in slots}, {self._known[slot]: slot for _, slot in slots}

    def _move_batch(self, present: list[ProcessedSequence]) -> Any:
        """Update the batch to the sequences that are present; returns the BatchUpdate, None if nothing has changed.

        New sequences fill gaps first; then the last ones move into the gaps that are left.
        """
        batch, kinds = self._batch, interface_in_use()
        stays, was = set(present), set(batch)
        gaps = [i for i, member in enumerate(batch) if member not in stays]
        new = [member for member in present if member not in was]
        if not gaps and not new:
            return None
        added, moved, removed = [], [], []
        for member in new:
            index = gaps.pop(0) if gaps else len(batch)
            batch[index : index + 1] = [member]
            added.append((index, member.params, member.prompt_ids, member.output_ids))
        while gaps:
            last = len(batch) - 1
            if gaps[-1] == last:
                removed.append(gaps.pop())
            else:
                index = gaps.pop(0)
                batch[index] = batch[last]
                moved.append((last, index, kinds.MoveDirectionality.UNIDIRECTIONAL))
            batch.pop()
        return kinds.BatchUpdate(batch_size=len(batch), removed=removed, added=added, moved=moved)

    def _whole_batch(self, members: Sequence[ProcessedSequence]) -> Any:
        """The BatchUpdate that adds all of them, for a new instance."""
        added = [(i, m.params, m.prompt_ids, m.output_ids) for i, m in enumerate(members)]
        return interface_in_use().BatchUpdate(batch_size=len(members), removed=[], added=added, moved=[])

    def _apply_all(self, logits: torch.Tensor, update: Any) -> tuple[torch.Tensor, set[int]]:
        """Apply every processor to logits float32 [batch, V]; also returns the indices of requests that failed."""
        failed: set[int] = set()
        temperatures = [member.params.temperature or 1.0 for member in self._batch]
        scale = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        for processor in self._processors:
            before, change = logits / scale if processor.is_argmax_invariant else logits, update
            try:
                if processor.instance is None:
                    processor.instance, change = processor.make(), self._whole_batch(self._batch)
                after = _applied(processor.instance, change, before.clone())
            except FAILURES:
                log.exception("the logits processor %s failed; its requests are tried one by one", processor.name)
                processor.instance = None
                after, failing = self._alone(processor, before)
                failed |= failing
            logits = after * scale if processor.is_argmax_invariant else after
        return logits, failed

    def _alone(self, processor: Processor, before: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
        """Apply a processor to each request alone; returns the logits and the indices of requests that failed."""
        after, failing = before.clone(), set(range(MAX_TRIED_ALONE, len(self._batch)))
        for i, member in enumerate(self._batch[:MAX_TRIED_ALONE]):
            try:
                after[i : i + 1] = _applied(processor.make(), self._whole_batch([member]), before[i : i + 1].clone())
            except FAILURES as error:
                log.error("%s failed on one request: %s", processor.name, reason(error))
                failing.add(i)
        return after, failing


def _applied(instance: Any, update: Any, logits: torch.Tensor) -> torch.Tensor:
    shape, dtype = logits.shape, logits.dtype
    instance.update_state(update)
    after = instance.apply(logits)
    if not isinstance(after, torch.Tensor) or after.shape != shape:
        raise TypeError(f"apply must return logits of the shape {tuple(shape)}")
    return after.to(dtype)
