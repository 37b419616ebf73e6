"""Replay: lets requests outlive their workers. Requests that ran when the workers died run again, from the known tokens.

The scheduler makes every running sequence a waiting one (`Scheduler.reset`), as if it had been preempted; its grammar, seed and
counts go on by position. This file decides which requests do not run again, because they may be the cause. A sequence is a
suspect if it had a row in a step at a death, until it gets a new token. A suspect that dies again is *found* if it was the only
one at both deaths; its request ends with an error. Where there are several, they are told apart:

    suspects that have no token at all           wait until the others have one, and start one by one
    suspects of two deaths in a row              start one by one, too
    suspects of a death that follows a find      are all found: each death costs a restart, and too many end the engine

So a request that kills its workers ends at the second death, or at the third if it had tokens and company, and takes no other
request with it. A step of a beam search ends with its workers.

Owned by the core's loop. frontend/client/resend.py does the same for requests of an engine that is lost as a whole.
"""

import logging
from collections import deque

from quire.enginecore.owners import Owners
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.workers import WorkerGroup

log = logging.getLogger("quire.enginecore")

HELD_S = 10.0  # how long sequences start one by one; then all of them do

FAILED = "the engine's worker failed while the request was running"
FAILED_TWICE = "the engine's worker failed twice while the request was running, which may be the cause"


class Replay:
    """is_on: whether requests run again at all."""

    def __init__(self, scheduler: Scheduler, workers: WorkerGroup, owners: Owners, is_on: bool) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._owners = owners
        self._is_on = is_on
        self._suspects: set[Sequence] = set()  # may run, and had no token since they died
        self._alone: set[Sequence] = set()  # those of them that were, or started as, the only one
        self._held: deque[Sequence] = deque()  # by order; suspects that wait for these
        self._held_until: float | None = None  # None until the workers are ready
        self._was_found = False  # a suspect was found at the last death

    def workers_died(self, why: str) -> None:
        """The workers were killed, and the steps in flight are forgotten: end or replay the requests that ran."""
        lost = self._scheduler.reset()
        failed = {(seq.owner, seq.request_id): FAILED for seq, _ in lost if seq.num_candidates or not self._is_on}
        again = {(seq.owner, seq.request_id) for seq, _ in lost} - failed.keys()
        in_step = {seq for seq, was_in_step in lost if was_in_step and (seq.owner, seq.request_id) in again}
        repeated = {seq for seq in in_step if len(seq.known) == seq.died_at}
        found = repeated if self._was_found else repeated & self._alone if len(repeated) == 1 else set()
        failed |= {(seq.owner, seq.request_id): FAILED_TWICE for seq in found}
        num_again = sum((seq.owner, seq.request_id) not in failed for seq, _ in lost)
        log.error(
            "%s; %d sequences in flight run again%s", why, num_again, f", {len(failed)} requests failed" if failed else ""
        )
        for (owner, request_id), text in failed.items():
            self._scheduler.abort(owner, request_id)  # with its sequences that were still waiting
            self._owners.refuse(owner, request_id, "engine_error", text)
        self._scheduler.counters.replays += len(again - failed.keys())
        self._scheduler.counters.replays_given_up += len({(seq.owner, seq.request_id) for seq in found})
        for seq in in_step:
            seq.died_at = len(seq.known)
        self._was_found = bool(found)
        self._suspects = {seq for seq in self._suspects | in_step if self._is_suspect(seq)}
        self._alone = set(repeated or in_step) if len(repeated or in_step) == 1 else set()
        self._hold(repeated)

    def _hold(self, repeated: set[Sequence]) -> None:
        """Let suspects wait that must start one by one; none of them, if one was just found."""
        held = {seq for seq in self._held if seq.state is not SequenceState.FINISHED}
        self._held, self._held_until = deque(), None
        if self._was_found:
            for seq in held:
                self._scheduler.release(seq)
            self._suspects |= held
            return
        new = {seq for seq in self._suspects - held if seq in repeated or len(seq.known) == len(seq.prompt)}
        for seq in new:
            self._scheduler.defer(seq)
        self._held.extend(sorted(held | new, key=lambda seq: seq.order))
        self._suspects -= held | new

    def turn(self, now: float) -> None:
        """Start the next sequence that waits for others, if it is time. now: seconds of a clock that never goes back."""
        if not (self._suspects or self._held) or not self._workers.is_ready:
            return
        suspects = {seq for seq in self._suspects if self._is_suspect(seq)}
        if len(suspects) < len(self._suspects):
            self._suspects, self._was_found = suspects, False
        if self._held_until is None:
            self._held_until = now + HELD_S
        while self._held and (not self._suspects or now >= self._held_until):
            seq = self._held.popleft()
            if seq.state is not SequenceState.FINISHED:
                self._alone = set() if self._suspects else {seq}
                self._scheduler.release(seq)
                self._suspects.add(seq)

    def _is_suspect(self, seq: Sequence) -> bool:
        known = seq.known if seq.slot < 0 else self._scheduler.slots.known(seq)
        return seq.state is not SequenceState.FINISHED and len(known) == seq.died_at
