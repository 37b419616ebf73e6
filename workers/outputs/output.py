"""Output: one kind of result of a step. The runner has a list of them, and asks those that a plan wants for their results.

An output says whether it needs the hidden states of every token; otherwise a step computes those of each sample's token only.
It takes what it reads of the step from `Computed`, where logits are computed once, by the first output that asks for them.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Protocol

import torch

from quire.ipc.messages.workers import SideResult
from quire.ipc.step.plan import StepPlan
from quire.kernels.step.tables import StepBuffers
from quire.workers.devices.masks import ReadMasks
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel


class RowResult(Protocol):
    """A result beside the tokens, on its way to the core."""

    def message(self) -> SideResult: ...


class Computed:
    """A step with its forward launched. hidden: [tokens, H] if has_every_token, else [samples, H]."""

    def __init__(
        self,
        model: LanguageModel,
        buffers: StepBuffers,
        parallel: Parallel,
        plan: StepPlan,
        device_plan: torch.Tensor,
        hidden: torch.Tensor,
        has_every_token: bool,
        read_masks: ReadMasks,
    ) -> None:
        self.buffers, self.plan, self.device_plan = buffers, plan, device_plan
        self._model, self._parallel = model, parallel
        self.hidden, self.has_every_token, self.read_masks = hidden, has_every_token, read_masks

    @cached_property
    def samples(self) -> torch.Tensor:
        """Hidden states of each sample, [samples, H]: a row without windows has one, at its last token."""
        if not self.has_every_token:
            return self.hidden
        return self.hidden.index_select(0, self.buffers.logits_indices[: self.plan.num_samples])

    @cached_property
    def logits(self) -> torch.Tensor:
        """Logits of the samples, of this rank's shard of the vocabulary. Sampling changes them."""
        return self._model.compute_logits(self.samples)

    @cached_property
    def all_logits(self) -> torch.Tensor:
        """The same of the whole vocabulary; from now on `logits` are these."""
        self.__dict__["logits"] = self._parallel.all_logits(self.logits, self._model.config.vocab_size)
        return self.logits


class Output(ABC):
    """Outputs compute in the order of the runner's list."""

    @abstractmethod
    def is_wanted(self, plan: StepPlan) -> bool:
        """Whether the plan has rows with such results."""

    def needs_every_token(self, plan: StepPlan) -> bool:
        """Whether the hidden states of every token are needed, not only those of samples."""
        return False

    def begin(self, plan: StepPlan) -> None:  # noqa: B027 - most outputs have nothing to say
        """Before the step's forward: tell the model what it must know of the plan's rows."""

    @abstractmethod
    def compute(self, step: Computed) -> list[RowResult]:
        """The step's results of this kind that are not in the result ring."""
