"""Replay: lets requests outlive their workers. Requests that ran when the workers died run again, from the known tokens.

The scheduler makes every running sequence a waiting one (`Scheduler.reset`), as if it had been preempted; its grammar, seed and
counts go on by position. This file decides which requests do not run again, because they may be the cause. A sequence is a
suspect if it had a row in a step at a death, until it gets a new token. A suspect that dies again is *found* if both deaths
were the workers' own, or if it was the only one at both; its request ends with an error. Suspects are told apart:

    suspects of a death of the workers' own      start one by one, those first that have tokens
    suspects that have no token at all           do so, too, whatever the workers died of
    suspects of two deaths in a row              as well
    suspects of a death that follows a find      are all found: each death costs a restart, and too many end the engine

So a request that makes its workers fail ends at the second death, and takes no other request with it. A signal from outside is
seldom a request's work: workers that an operator kills twice in a row, or the kernel for lack of memory, take no request with
them that had company. Such a request ends at the next two deaths for which it is the only suspect. A step of a beam search ends
with its workers.

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
        self._blamed: set[Sequence] = set()  # those, running or held, of a death that was the workers' own
        self._alone: set[Sequence] = set()  # those of them that were the only one at the last death
        self._started_alone: set[Sequence] = set()  # those that started as the only one since
        self._held: deque[Sequence] = deque()  # by order; suspects that wait for these
        self._held_until: float | None = None  # None until the workers are ready
        self._was_found = False  # a suspect was found at the last death

    def workers_died(self, why: str, from_outside: bool) -> None:
        """The workers were killed, and the steps in flight are forgotten: end or replay the requests that ran. from_outside: a
        signal from outside had ended or stopped one of them."""
        lost = self._scheduler.reset()
        failed = {(seq.owner, seq.request_id): FAILED for seq, _ in lost if not (seq.task.runs_again and self._is_on)}
        again = {(seq.owner, seq.request_id) for seq, _ in lost} - failed.keys()
        in_step = {seq for seq, was_in_step in lost if was_in_step and (seq.owner, seq.request_id) in again}
        repeated = {seq for seq in in_step if len(seq.known) == seq.died_at}
        alone = self._alone if from_outside else self._alone | self._started_alone
        found = repeated if self._was_found else repeated & alone if len(repeated) == 1 else set()
        found |= set() if from_outside else repeated & self._blamed
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
        self._blamed = {seq for seq in self._blamed - in_step if self._is_suspect(seq)}
        self._blamed |= set() if from_outside else self._suspects & in_step
        self._alone, self._started_alone = set(repeated or in_step) if len(repeated or in_step) == 1 else set(), set()
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
        new = {seq for seq in self._suspects - held if seq in repeated | self._blamed or not has_tokens(seq)}
        for seq in new:
            self._scheduler.defer(seq)
        self._held.extend(sorted(held | new, key=lambda seq: (not has_tokens(seq), seq.order)))
        self._suspects -= held | new
        while self._held and not self._suspects:  # before new requests
            self._start_next()

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
            self._start_next()

    def _start_next(self) -> None:
        seq = self._held.popleft()
        if seq.state is not SequenceState.FINISHED:
            self._alone &= {seq}
            self._started_alone = set() if self._suspects else {seq}
            self._scheduler.release(seq)
            self._suspects.add(seq)

    def _is_suspect(self, seq: Sequence) -> bool:
        known = seq.known if seq.slot < 0 else self._scheduler.slots.known(seq)
        return seq.state is not SequenceState.FINISHED and len(known) == seq.died_at


def has_tokens(seq: Sequence) -> bool:
    """Whether a sequence without a slot has any token beyond its prompt."""
    return len(seq.known) > len(seq.prompt)
