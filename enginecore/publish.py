"""A step's results as messages: one StepOutputs for each frontend that has new tokens in it."""

from collections import defaultdict

import numpy as np

from quire.enginecore.scheduling.step import StepOutput
from quire.ipc.messages import Finished, Started, StepOutputs, TokenLogprobs
from quire.ipc.step.result_ring import ResultRing


def read_logprobs(out: StepOutput, ring: ResultRing, step: int, num_logprobs: np.ndarray) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens in `out` whose requests want them, cut to what each asked for (int [rows of out])."""
    result = []
    for i in out.wants_logprobs.nonzero()[0]:
        logprob, rank, ids, logprobs = ring.logprobs(step, int(out.rows[i]))
        n = int(num_logprobs[i])
        result.append(
            TokenLogprobs(
                logprob=float(logprob),
                rank=int(rank),
                top_ids=np.ascontiguousarray(ids[:n], np.int32).tobytes(),
                top_logprobs=np.ascontiguousarray(logprobs[:n], np.float32).tobytes(),
            )
        )
    return result


def messages_of(out: StepOutput, logprobs: list[TokenLogprobs], epoch: int) -> list[tuple[int, StepOutputs]]:
    """(owner, message) for every frontend with a token in this step. `seq` is set by the endpoint when it sends."""
    owners = out.owners
    if not len(owners):
        return []
    if (owners == owners[0]).all():
        finished, started = [f for _, f in out.finished], [s for _, s in out.started]
        keys, tokens = out.keys.tobytes(), out.tokens.astype(np.int32, copy=False).tobytes()
        return [(int(owners[0]), StepOutputs(epoch, 0, keys, tokens, finished, started, logprobs))]
    return _split(out, logprobs, epoch)


def _split(out: StepOutput, logprobs: list[TokenLogprobs], epoch: int) -> list[tuple[int, StepOutputs]]:
    finished: dict[int, list[Finished]] = defaultdict(list)
    started: dict[int, list[Started]] = defaultdict(list)
    wanted: dict[int, list[TokenLogprobs]] = defaultdict(list)
    for owner, f in out.finished:
        finished[owner].append(f)
    for owner, s in out.started:
        started[owner].append(s)
    for owner, entry in zip(out.owners[out.wants_logprobs].tolist(), logprobs, strict=True):
        wanted[owner].append(entry)
    messages = []
    for owner in np.unique(out.owners).tolist():
        mine = out.owners == owner
        keys, tokens = out.keys[mine].tobytes(), out.tokens[mine].astype(np.int32, copy=False).tobytes()
        messages.append((owner, StepOutputs(epoch, 0, keys, tokens, finished[owner], started[owner], wanted[owner])))
    return messages
