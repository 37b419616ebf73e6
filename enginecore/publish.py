"""Turns a step's results into messages: one StepOutputs for each frontend with new tokens, and results beside the tokens.

It has no state: the core (core.py) passes in the scheduler's output of a step, and sends the messages that it gets back.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from quire.enginecore.pooled import pooled_messages
from quire.enginecore.scheduling.step import StepOutput
from quire.enginecore.tasks.task import SideTarget
from quire.ipc.messages.frontend import CoreMessage, Finished, PromptLogprobs, Started, StepOutputs, TokenLogprobs
from quire.ipc.messages.workers import PooledRows, PromptLogprobsOfRow, SideResult
from quire.ipc.step.result_ring import ResultRing

NO_DRAFTS = np.zeros((0, 4), np.int64)


def read_logprobs(out: StepOutput, ring: ResultRing, step: int, num_logprobs: np.ndarray) -> list[TokenLogprobs]:
    """Logprobs of the tokens in `out`, for requests that want them. num_logprobs, int [rows]: how many each row asked for."""
    places = out.places[out.wants_logprobs]
    if not len(places):
        return []
    got = ring.logprobs(step, places)
    most = num_logprobs[out.rows[out.wants_logprobs]].tolist()
    return [
        TokenLogprobs(logprob, rank, ids[:n].tobytes(), logprobs[:n].tobytes())
        for logprob, rank, ids, logprobs, n in zip(
            got.logprobs.tolist(), got.ranks.tolist(), got.top_ids, got.top_logprobs, most, strict=True
        )
    ]


def side_messages(results: list[SideResult], targets: Mapping[int, SideTarget], epoch: int) -> list[tuple[int, CoreMessage]]:
    """(owner, message) for a step's side results, those that a request waits for; `targets`: their requests, by row."""
    messages: list[tuple[int, CoreMessage]] = []
    for result in results:
        match result:
            case PooledRows():
                messages += pooled_messages(result, targets, epoch)
            case PromptLogprobsOfRow() if result.logprobs and result.row in targets:  # a prompt of one token has none
                target, num_top = targets[result.row], len(result.top_ids) // len(result.ranks)
                columns = (result.logprobs, result.ranks, result.top_ids, result.top_logprobs)
                messages.append((target.owner, PromptLogprobs(epoch, target.request_id, target.start, num_top, *columns)))
    return messages


def messages_of(
    out: StepOutput, logprobs: list[TokenLogprobs], epoch: int, tells_drafts: bool = False
) -> list[tuple[int, StepOutputs]]:
    """(owner, message) for every frontend with a token in this step. `seq` is set by the link when it sends. tells_drafts:
    whether messages have counts of drafts, too."""
    owners = out.owners
    if not len(owners):
        return []
    drafts = _drafts(out) if tells_drafts else NO_DRAFTS
    if (owners == owners[0]).all():
        finished, started = [f for _, f in out.finished], [s for _, s in out.started]
        keys, tokens = out.keys.tobytes(), out.tokens.astype(np.int32, copy=False).tobytes()
        return [(int(owners[0]), StepOutputs(epoch, 0, keys, tokens, finished, started, logprobs, drafts[:, 1:].tobytes()))]
    return _split(out, logprobs, drafts, epoch)


def _drafts(out: StepOutput) -> np.ndarray:
    """int64 [n, 4]: owner, key, drafts that were verified and that were accepted, of each sequence with drafts and a token."""
    first = np.flatnonzero(np.diff(out.rows, prepend=-1))  # a row's tokens are neighbors
    num_tokens = np.diff(first, append=len(out.rows))
    drafted = out.drafted[out.rows[first]]
    found = np.stack([out.owners[first], out.keys[first], drafted, num_tokens - 1], 1, dtype=np.int64)
    return found[drafted > 0]


def _split(out: StepOutput, logprobs: list[TokenLogprobs], drafts: np.ndarray, epoch: int) -> list[tuple[int, StepOutputs]]:
    finished: dict[int, list[Finished]] = defaultdict(list)
    started: dict[int, list[Started]] = defaultdict(list)
    logprobs_of: dict[int, list[TokenLogprobs]] = defaultdict(list)
    for owner, f in out.finished:
        finished[owner].append(f)
    for owner, s in out.started:
        started[owner].append(s)
    for owner, entry in zip(out.owners[out.wants_logprobs].tolist(), logprobs, strict=True):
        logprobs_of[owner].append(entry)
    messages = []
    for owner in np.unique(out.owners).tolist():
        mine = out.owners == owner
        keys, tokens = out.keys[mine].tobytes(), out.tokens[mine].astype(np.int32, copy=False).tobytes()
        more = drafts[drafts[:, 0] == owner, 1:].tobytes()
        lists = finished[owner], started[owner], logprobs_of[owner]
        messages.append((owner, StepOutputs(epoch, 0, keys, tokens, *lists, more)))
    return messages
