"""Replay: lets requests outlive their workers. What ran when the workers died runs again, from the tokens that are known.

The scheduler makes every running sequence a waiting one (`Scheduler.reset`), as if it had been preempted; its grammar, seed and
counts go on by position. This file decides which requests do not run again. A request with a sequence in a step at two deaths,
without a new token between them, may be the cause and ends with an error; so does a step of a beam search.

A request may also be the cause of the first death. So that it does not take others with it at the second one, sequences that
died before their first token wait until those that died later have a token again, and then start one by one; all of them do
when a request was found to be the cause.

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
        self._suspects: list[Sequence] = []  # were in a step at the last death, may run, and had no token since
        self._held: deque[Sequence] = deque()  # by order; wait for these
        self._held_until: float | None = None  # None until the workers are ready

    def workers_died(self, why: str) -> None:
        """The workers were killed, and the steps in flight are forgotten: end or replay the requests that ran."""
        failed: dict[tuple[int, int], str] = {}
        suspects: list[Sequence] = []
        lost = self._scheduler.reset()
        for seq, was_in_step in lost:
            num_known = len(seq.known)
            if not self._is_on or seq.num_candidates:
                failed[seq.owner, seq.request_id] = FAILED
            elif was_in_step and num_known == seq.died_at:
                failed[seq.owner, seq.request_id] = FAILED_TWICE
            elif was_in_step:
                seq.died_at = num_known
                suspects.append(seq)
        again = {(seq.owner, seq.request_id) for seq, _ in lost} - failed.keys()
        log.error("%s; of the requests in flight %d run again and %d end with an error", why, len(again), len(failed))
        for (owner, request_id), text in failed.items():
            self._scheduler.abort(owner, request_id)  # with its sequences that were still waiting
            self._owners.refuse(owner, request_id, "engine_error", text)
        counters, before = self._scheduler.counters, self._scheduler.counters.replays_given_up
        counters.replays += len(again)
        counters.replays_given_up += sum(text is FAILED_TWICE for text in failed.values())
        self._suspects = [seq for seq in (*self._suspects, *suspects) if self._is_suspect(seq)]
        self._hold(counters.replays_given_up > before)

    def _hold(self, is_found: bool) -> None:
        """Let suspects without any token wait; none of them waits if the cause was found."""
        held = {seq for seq in self._held if seq.state is not SequenceState.FINISHED}
        first = {seq for seq in self._suspects if len(seq.known) == len(seq.prompt)} - held
        if is_found:
            for seq in held:
                self._scheduler.release(seq)
            self._held = deque()
            return
        for seq in first:
            self._scheduler.defer(seq)
        self._held, self._held_until = deque(sorted(held | first, key=lambda seq: seq.order)), None
        self._suspects = [seq for seq in self._suspects if seq not in first]

    def turn(self, now: float) -> None:
        """Start the next sequence that waits for others, if it is time. now: seconds of a clock that never goes back."""
        if not self._held or not self._workers.is_ready:
            return
        if self._held_until is None:
            self._held_until = now + HELD_S
        self._suspects = [seq for seq in self._suspects if self._is_suspect(seq)]
        while self._held and (not self._suspects or now >= self._held_until):
            seq = self._held.popleft()
            if seq.state is not SequenceState.FINISHED:
                self._scheduler.release(seq)
                self._suspects.append(seq)

    def _is_suspect(self, seq: Sequence) -> bool:
        known = seq.known if seq.slot < 0 else self._scheduler.slots.known(seq)
        return seq.state is not SequenceState.FINISHED and len(known) == seq.died_at
