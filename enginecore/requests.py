"""Requests: a request's way from its message to the scheduler, and how one ends that has not ended by itself.

A request is checked (intake.py), waits for what it needs (preparation.py), and goes to the scheduler. Here it is also aborted,
finished, and ended when its deadline has come; and when the workers are away for longer than requests may wait, those that wait
are told so. It sends errors only; the core's loop (core.py) calls it for each message, and `turn` in each of its turns.
"""

import logging
import time
from collections.abc import Callable, Iterable

from quire.enginecore.adapters.adapters import Adapters
from quire.enginecore.failed_items import failed_by
from quire.enginecore.intake import Intake, IntakeConfig, in_words
from quire.enginecore.media.item_traffic import Failed, ItemTraffic
from quire.enginecore.owners import Owners
from quire.enginecore.preparation import Preparer, PreparingRequests
from quire.enginecore.scheduling.peak_estimate import FIRST_GUESS
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.tenants.backlog import Backlog, Room
from quire.enginecore.tenants.deadlines import Deadlines
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import Abort, AddRequest, Finish, RequestError
from quire.ipc.messages.media import MediaData, MediaGone

log = logging.getLogger("quire.enginecore")

MANY_ROWS = 4  # a step with a quarter of max_num_seqs says something about a full one
AWAY_LOOK_S = 0.5  # between looks at what waits while the workers are away


class Requests:
    """log_requests: whether each is logged. clock: of deadlines, and of the workers' absence."""

    def __init__(
        self,
        config: IntakeConfig,
        scheduler: Scheduler,
        owners: Owners,
        workers: WorkerGroup,
        preparers: Iterable[Preparer],
        log_requests: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backlog = Backlog(config.bounds, lambda: scheduler.counters.mean_output or FIRST_GUESS)
        self.intake = Intake(config, scheduler.kv.hasher, self.backlog)
        self.preparing = PreparingRequests(preparers)
        self.scheduler = self._scheduler = scheduler
        self._owners, self._workers = owners, workers
        scheduler.items.bytes.wake = self.preparing.look_again
        self._traffic = ItemTraffic(scheduler.items.bytes, owners, workers, clock)
        workers.on_item_failed = lambda message: self._fail(failed_by(message, scheduler))
        limits, parts = config.limits.adapters, (scheduler, owners, workers, self.preparing)
        self.adapters = Adapters(limits, config.bounds, *parts) if limits is not None else None
        self._log_requests = log_requests
        self.clock = clock
        self.deadlines = Deadlines(self.has)
        self._num_cached = self._draft_depth = 0
        self._away_since: float | None = None
        self._look_at = 0.0

    def has(self, owner: int, request_id: int) -> bool:
        return self._scheduler.has_request(owner, request_id) or self.preparing.has_request(owner, request_id)

    # ------------------------------------------------------------------------------------------------------ messages
    def add(self, owner: int, message: AddRequest) -> None:
        if self.has(owner, message.id):
            return self._owners.refuse(owner, message.id, "invalid", f"request id {message.id} is in use")
        accepted = self.intake.accept(owner, message, self._room())
        if isinstance(accepted, RequestError):
            return self._owners.send(owner, accepted)
        if message.timeout_s:
            self.deadlines.add(owner, message.id, self.clock() + message.timeout_s)
        self._scheduler.counters.replays += message.task.is_resumed
        if not self.preparing.start(owner, message, accepted):
            for seq in accepted:
                self._scheduler.add(seq)
        if self._log_requests:
            log.info(in_words(message))
        return None

    def handle(self, owner: int, message: Abort | Finish | MediaData | MediaGone) -> None:
        """A frontend's messages about requests that were accepted."""
        match message:
            case Abort():
                for request_id in message.ids:
                    self.abort(owner, request_id)
            case Finish():
                self.finish(owner, message.key)
            case MediaData() | MediaGone():
                self._fail(self._traffic.take(owner, message))

    def _fail(self, failed: Iterable[Failed]) -> None:
        for owner, request_id, code, text in failed:
            if self.has(owner, request_id):
                self.abort(owner, request_id)
                self._owners.refuse(owner, request_id, code, text)

    def abort(self, owner: int, request_id: int) -> None:
        self._scheduler.abort(owner, request_id)
        self.preparing.abort(owner, request_id)

    def finish(self, owner: int, key: int) -> None:
        """The frontend has ended one sequence."""
        self._scheduler.finish(owner, key)
        self.preparing.finish(owner, key)

    def abort_owner(self, owner: int) -> int:
        """End all requests of a frontend; returns how many sequences they had."""
        return self._scheduler.abort_owner(owner) + self.preparing.abort_owner(owner)

    def _room(self) -> Room:
        """num_waiting: sequences that were accepted and do not run yet, beyond those that `max_num_seqs` has room for."""
        scheduler, now = self._scheduler, self.clock()
        room = scheduler.config.max_num_seqs - scheduler.num_running
        num_waiting = max(len(scheduler.waiting) + self.preparing.num_sequences - room, 0)
        away_s = 0.0 if self._away_since is None or self._workers.is_ready else now - self._away_since
        return Room(num_waiting, room, now, away_s, self._workers.start_s)

    # ------------------------------------------------------------------------------------------------------ each turn
    def turn(self) -> None:
        """Pass on what is ready, and end what is overdue."""
        if self.adapters is not None:
            self.adapters.turn()
        for request in self.preparing.take_ended():
            if request.failure is not None:
                self._owners.refuse(request.owner, request.id, *request.failure)
                continue
            for seq in request.sequences:
                self._scheduler.add(seq)
        if self.deadlines:
            for owner, request_id in self.deadlines.overdue(self.clock()):
                self.abort(owner, request_id)
                self._owners.refuse(owner, request_id, "deadline_exceeded", "the request's timeout has passed")
        if self._traffic.has_work:
            self._fail(self._traffic.turn())
            if self._traffic.is_sending:
                self.preparing.look_again()
        if not self._workers.is_ready:
            self._look_after_waiting()
        elif self._away_since is not None:
            self._away_since = None

    def _look_after_waiting(self) -> None:
        """The workers are away: end what may not wait longer than they have been."""
        now, most_s = self.clock(), self.backlog.bounds.max_queue_s
        if self._away_since is None:
            self._away_since = now
        if not most_s or now < self._away_since + most_s or now < self._look_at:
            return
        self._look_at = now + AWAY_LOOK_S
        refusal = self.backlog.workers_away(self._workers.start_s)
        new = [seq for seq in self._scheduler.waiting if seq.is_bounded and not seq.first_scheduled]
        for owner, request_id in {(seq.owner, seq.request_id) for seq in new}:
            self.abort(owner, request_id)
            self._owners.refuse(owner, request_id, *refusal)

    def learn(self, step: ScheduledStep, seconds: float) -> None:
        """A step has returned that took so long: learn how fast what waits is computed, and how long decode steps take.

        Tokens found in the prefix cache count, as those of waiting prompts do, too."""
        scheduler, num_cached = self._scheduler, self._num_cached
        depth, self._draft_depth = self._draft_depth, step.draft_depth  # drafts delay the results of the step behind them
        if not step.prefills:
            scheduler.counters.step_times.learn(step.num_tokens, step.window > 1, seconds, depth, len(step.slots))
        self._num_cached = scheduler.counters.cached_tokens
        num_tokens = step.num_tokens + self._num_cached - num_cached
        if scheduler.waiting.first() is not None:
            self.backlog.rate.add(num_tokens, seconds)
        elif len(step.slots) * MANY_ROWS >= scheduler.config.max_num_seqs:
            self.backlog.rate_before.add(num_tokens, seconds)

    def check(self) -> None:
        """Assert that every request is in one place."""
        self.preparing.check()
        self.backlog.check()
        if self.adapters is not None:
            self.adapters.check()
        assert all(o in self._owners and not self._scheduler.has_request(o, r) for o, r in self.preparing)
        waiting = len(self._scheduler.waiting) + self.preparing.num_sequences
        assert self.backlog.totals.num_waiting == waiting, (self.backlog.totals.num_waiting, waiting)
