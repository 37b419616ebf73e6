"""PromptLogprobs: log-probabilities of a prompt's tokens, and the likeliest ones at each position, by raw logits.

The LM head runs over all tokens of a chunk, in slices, so such a step takes longer, and is never captured.
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.messages.workers import PromptLogprobsOfRow
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_PROMPT_LOGPROBS
from quire.kernels.sampling.sampler_cpu import prompt_logprobs
from quire.workers.models.language_model import LanguageModel
from quire.workers.outputs.output import Computed, Output, RowResult

PROMPT_LOGPROB_ROWS = 512  # rows of logits computed at once


class PromptRow(NamedTuple):
    """Log-probabilities of one chunk's next tokens; tensors on the CPU, [positions] or [positions, num_top]."""

    row: int
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def message(self) -> PromptLogprobsOfRow:
        arrays = self.logprobs.float(), self.ranks.int(), self.top_ids.int(), self.top_logprobs.float()
        return PromptLogprobsOfRow(self.row, *(a.contiguous().numpy().tobytes() for a in arrays))


class PromptLogprobs(Output):
    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def is_wanted(self, plan: StepPlan) -> bool:
        return plan.wants_prompt_logprobs

    def needs_every_token(self, plan: StepPlan) -> bool:
        return True

    def compute(self, step: Computed) -> list[RowResult]:
        plan, rows = step.plan, list[RowResult]()
        at, tokens_at = len(plan.decode_rows), 0
        prefill = plan.prefill_rows
        columns = (prefill[name].tolist() for name in ("length", "flags", "next_token", "num_prompt_logprobs"))
        for i, (length, flags, next_token, num_top) in enumerate(zip(*columns, strict=True)):
            if flags & PREFILL_PROMPT_LOGPROBS:
                targets = plan.prefill_tokens[tokens_at + 1 : tokens_at + length]
                if next_token >= 0:
                    targets = np.append(targets, np.int32(next_token))
                states = step.hidden[at : at + len(targets)]
                rows.append(self._row(len(plan.decode_rows) + i, states, targets, num_top, at))
            at += length
            tokens_at += length
        return rows

    def _row(self, row: int, states: torch.Tensor, targets: np.ndarray, num_top: int, first: int) -> PromptRow:
        """first: the number of the first state's token in the step."""
        target_ids = torch.from_numpy(targets.copy()).to(self._device)
        parts = [
            [x.cpu() for x in prompt_logprobs(self._logits(s, first + i * PROMPT_LOGPROB_ROWS), t, num_top)]
            for i, (s, t) in enumerate(
                zip(states.split(PROMPT_LOGPROB_ROWS), target_ids.split(PROMPT_LOGPROB_ROWS), strict=True)
            )
        ]
        if not len(targets):
            none = torch.zeros(0)
            return PromptRow(row, none, none.int(), none.int(), none)
        return PromptRow(row, *(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _logits(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Logits of tokens from number `first` on; the head may have adapters."""
        adapters = self._model.adapters
        if adapters is None or not adapters.is_active:
            return self._model.compute_all_logits(states)
        with adapters.of_tokens(first, len(states)):
            return self._model.compute_all_logits(states)
