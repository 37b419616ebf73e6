"""Candidates: the likeliest next tokens of rows that a beam search continues, by raw logits."""

import numpy as np
import torch

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_CANDIDATES
from quire.kernels.sampling.sampler_cpu import prompt_logprobs
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.outputs.prompt_logprobs import PromptRow

CANDIDATE_ROWS = 64  # rows of logits copied at once


class NextTokenCandidates(Output):
    """It comes before Tokens, since sampling changes the logits."""

    def is_wanted(self, plan: StepPlan) -> bool:
        return plan.wants_candidates

    def compute(self, step: Computed) -> list[RowResult]:
        plan, logits, found = step.plan, step.all_logits, list[RowResult]()
        prefill = plan.prefill_rows
        wanted = np.flatnonzero(prefill["flags"] & PREFILL_CANDIDATES)
        counts = prefill["num_prompt_logprobs"][wanted].tolist()
        rows = torch.from_numpy(wanted + len(plan.decode_rows))
        for at in range(0, len(rows), CANDIDATE_ROWS):
            part = rows[at : at + CANDIDATE_ROWS]
            x = logits.index_select(0, part.to(logits.device))
            columns = prompt_logprobs(x, x.new_zeros(len(part), dtype=torch.int64), max(counts))
            nums = counts[at : at + CANDIDATE_ROWS]
            per_row = zip(part.tolist(), nums, *(column.cpu().split(1) for column in columns), strict=True)
            for row, num, logprob, rank, ids, top in per_row:
                found.append(PromptRow(row, logprob, rank, ids[:, :num], top[:, :num]))
        return found
