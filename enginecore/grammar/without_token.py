"""WithoutToken: ends the requests of rows for which the workers have no token (NO_TOKEN), each with its reason, and no others.

Called by the core's loop with each step's tokens; a step in which every row has a token costs one comparison.
"""

import numpy as np

from quire.enginecore.owners import Owners
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.worker_profiles import WorkersFailed
from quire.ipc.messages.frontend import ErrorCode
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import NO_TOKEN, SAMPLING_PROCESSORS

TOO_LATE = "what its output may go on with was not found out in time"
PROCESSOR_FAILED = "a logits processor of the engine failed on this request"


class WithoutToken:
    def __init__(self, scheduler: Scheduler, owners: Owners, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._owners = owners
        self._vocab_size = vocab_size

    def end(self, step: ScheduledStep, samples: Samples) -> Samples:
        """End the requests of rows without a token; returns the samples with a 0 as token there.

        Raises WorkersFailed for values that no correct worker writes."""
        if not self._are_wrong(step, samples):  # NO_TOKEN is outside the vocabulary, too
            return samples
        if len(step.mask_rows):
            self._end(step, step.mask_rows, samples, TOO_LATE)
        if len(step.processed_rows):
            self._end(step, step.processed_rows, samples, PROCESSOR_FAILED)
        if self._are_wrong(step, samples):
            has_bans = self._scheduler.slots.sampling_kind[step.slots] & SAMPLING_PROCESSORS != 0
            self._end(step, has_bans.nonzero()[0], samples, None)
            if self._are_wrong(step, samples):
                raise WorkersFailed("a worker's result is a token outside the vocabulary")
        return samples

    def _are_wrong(self, step: ScheduledStep, samples: Samples) -> bool:
        wrong = samples.tokens.view(np.uint32) >= self._vocab_size
        return bool(wrong.any() and (wrong & step.samples[samples.rows]).any())

    def _end(self, step: ScheduledStep, rows: np.ndarray, samples: Samples, failure: str | None) -> None:
        """failure: the engine's; None where the request's own parameters leave no token."""
        without = ((samples.tokens == NO_TOKEN) & step.samples[samples.rows] & np.isin(samples.rows, rows)).nonzero()[0]
        for slot in step.slots[samples.rows[without]]:
            if not self._scheduler.slots.alive[slot]:
                continue  # aborted meanwhile, and another request may have its id by now
            seq = self._scheduler.slots.sequence(slot)
            code: ErrorCode = "invalid" if failure is None else "engine_error"
            text = nothing_left(seq.task.sampling) if failure is None else failure
            if self._scheduler.abort(seq.owner, seq.request_id):
                self._owners.refuse(seq.owner, seq.request_id, code, text)
        samples.tokens[without] = 0


def nothing_left(params: SamplingParams) -> str:
    """A text for the user that names the request's parameters that can forbid tokens. A bias of -100 forbids none."""
    p = params
    bans = {
        "allowed_token_ids": p.allowed_token_ids,
        "bad_words": p.bad_words_token_ids or p.bad_words,
        "min_tokens": p.min_tokens,
    }
    names = [name for name, value in bans.items() if value]
    leaves = f"{' and '.join(filter(None, [', '.join(names[:-1]), *names[-1:]]))} {'leave' if len(names) > 1 else 'leaves'}"
    return f"{leaves if names else 'the request leaves'} no token that the output may go on with"
