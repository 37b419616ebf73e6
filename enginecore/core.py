"""EngineCore: the loop. It takes requests from frontends, sends plans to workers, and sends the sampled tokens to frontends.

A turn: take messages -> fill the pipeline (two steps in flight a stage) -> take finished results -> publish -> wait.
It is one thread. Nothing that a frontend sends can end it. A worker that dies is replaced, and what was in flight runs again.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import zmq

from quire.enginecore.expert_load import ExpertLoad
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.grammar.masks import MASKS_LATE_S, StepMasks
from quire.enginecore.grammar.steps import GrammarSteps
from quire.enginecore.grammar.without_token import WithoutToken
from quire.enginecore.intake import IntakeConfig
from quire.enginecore.owners import Owners
from quire.enginecore.preparation import Preparer
from quire.enginecore.publish import messages_of, read_logprobs, side_messages
from quire.enginecore.replay import Replay
from quire.enginecore.requests import Requests
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.step import ScheduledStep, StepOutput
from quire.enginecore.stats import Expected, Statistics
from quire.enginecore.utilities import Utilities
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.worker_supervisor import WorkerSupervisor
from quire.enginecore.workers import WorkerGroup
from quire.ipc.links.core_to_frontends import CoreToFrontends, name_of
from quire.ipc.messages.frontend import (
    Abort,
    AddRequest,
    EngineLimits,
    Finish,
    FrontendMessage,
    ShuttingDown,
    TokenLogprobs,
    Utility,
)
from quire.ipc.messages.media import MediaData, MediaGone
from quire.ipc.messages.utilities import ServerInfo
from quire.ipc.messages.workers import ProcessorsInfo, SideResults
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import STEP_MASK

log = logging.getLogger("quire.enginecore")

STEPS_OF_STAGE = 2  # in flight: the stage runs one, and the next is ready when it is done
HEARTBEAT_INTERVAL_S = 0.5
SPIN_S = 2e-3  # the loop spins from this long before a step's expected end: the poller's resolution is 1 ms
SPIN_LOOKS = 100  # checks of the result ring between two polls of the sockets; a poll takes as long as all of them
LATE_S = 1e-2  # how long the loop keeps spinning for a step that takes longer than expected
AWAKE_S = 5e-3  # how long it spins for a request after the last result: to wake it took 0.04 to 0.5 ms
PUBLISH_FIRST_ROWS = 32  # up to these, publish before planning: the plan is still ready before the GPU needs it


@dataclass(frozen=True)
class CoreConfig:
    scheduler: SchedulerConfig
    limits: EngineLimits
    max_num_waiting: int
    seed: int
    step_timeout_s: float
    spins: bool  # whether the loop may spin: not if the workers need the CPU
    log_requests: bool
    log_stats: bool
    info: ServerInfo = field(default_factory=lambda: ServerInfo({}))
    has_profiler: bool = False
    processors: ProcessorsInfo | None = None
    replay: bool = True  # whether requests outlive workers that die
    max_num_queued_tokens: int = 0  # 0: no bound
    max_queue_s: float = 0.0  # 0: no bound
    tells_drafts: bool = False  # frontends are sent the counts of each sequence's drafts


@dataclass
class InFlight:
    scheduled: ScheduledStep
    sent_at: float
    logprob_rows: np.ndarray
    num_logprobs: np.ndarray  # int32 [rows]: how many alternatives each row wants; empty if logprob_rows is


class EngineCore:
    """workers: must be ready. on_heartbeat: called with each heartbeat, for a parent process that watches this one. preparers:
    prepare what requests need before they can run (preparation.py). grammars: the preparer of structured output."""

    def __init__(
        self,
        config: CoreConfig,
        link: CoreToFrontends,
        workers: WorkerGroup,
        on_heartbeat: Callable[[], None] = lambda: None,
        preparers: Iterable[Preparer] = (),
        grammars: GrammarCompiler | None = None,
    ):
        self.config = config
        self.link = link
        self.workers = workers
        self.supervisor = WorkerSupervisor(workers, config.step_timeout_s)
        self.scheduler = Scheduler(config.scheduler)
        s = config.scheduler
        self.owners = Owners(link)
        accepts = IntakeConfig(
            limits=config.limits,
            eos_token_ids=s.eos_token_ids,
            enable_prefix_caching=s.enable_prefix_caching,
            by_priority=s.policy == "priority",
            seed=config.seed,
            max_num_waiting=config.max_num_waiting,
            processors=config.processors,
            max_num_queued_tokens=config.max_num_queued_tokens,
            max_queue_s=config.max_queue_s,
        )
        all_preparers = [*preparers, *([grammars.prepare] if grammars is not None else [])]
        self.requests = Requests(accepts, self.scheduler, self.owners, workers, all_preparers, config.log_requests)
        self.preparing = self.requests.preparing
        self.stopping = False
        self._draining_until = 0.0
        self.utilities = Utilities(self.owners, workers, self.requests, config.info, config.has_profiler)
        self._in_flight: deque[InFlight] = deque()
        self._max_in_flight = STEPS_OF_STAGE * s.num_micro_batches
        self._side_results: dict[int, SideResults] = {}  # by step; not passed on yet
        self._masks = StepMasks(config.step_timeout_s)
        self._grammar = GrammarSteps(self.scheduler, workers, self.owners, self._masks, grammars, link.epoch)
        self.replay = Replay(self.scheduler, workers, self.owners, config.replay)
        self._without_token = WithoutToken(self.scheduler, self.owners, config.limits.vocab_size)
        self._wants_stacks = False
        self._expected = Expected()
        self._last_result = 0.0
        self._next_heartbeat = 0.0
        self._on_heartbeat = on_heartbeat
        self.stats = Statistics(config.log_stats, s.max_num_seqs)
        self.expert_load = ExpertLoad(workers)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # for signal handlers, which do not interrupt a poll
        self._poller = self._make_poller()

    def close(self) -> None:
        """May be called again."""
        self.preparing.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        ours = self._wake_fd, self.preparing.fileno(), *self._grammar.pollables()
        for source in (*self.link.sockets(), *ours, *self.workers.pollables()):
            poller.register(source, zmq.POLLIN)
        return poller

    # --------------------------------------------------------------------------------------------------- the loop
    def run(self) -> None:
        """Run until `stop` was called and the requests that it waits for have ended. Raises WorkersFailed to give up."""
        while not self._may_end():
            try:
                self._take_messages()
                self._watch_workers()
                self._fill()
                if not self._collect():
                    self._wait()
                    self._collect()  # before messages, which have not waited as long as this result
            except WorkersFailed as error:
                self._replace_workers(str(error))
            self._heartbeat()
        self.link.broadcast(ShuttingDown(self.link.epoch))

    def stop(self, grace_s: float) -> None:
        """Take no new requests; end when the present ones are done, at the latest after grace_s. Safe in a signal handler."""
        self.stopping = True
        self._draining_until = min(self._draining_until or float("inf"), time.monotonic() + grace_s)
        self._wake()

    def ask_for_stacks(self) -> None:
        """Log the stacks of the core's and the serving workers' threads. Safe in a signal handler."""
        self._wants_stacks = True
        self._wake()

    def _may_end(self) -> bool:
        # finished sequences that only wait for their last step must not delay the end: a worker that hangs never returns it
        has_requests = self.scheduler.has_requests or bool(self.preparing)
        return self.stopping and (not has_requests or time.monotonic() > self._draining_until)

    def check(self) -> None:
        """Assert that every request is in one place, and that nothing is leaked."""
        self.scheduler.check()
        self.requests.check()

    def _take_messages(self) -> None:
        for identity, message in self.link.receive(limit=256):
            self._handle(identity, message)
        self.link.flush()
        self._drop_lost()  # afterwards: requests that a frontend sent before it was lost end with it
        self.requests.turn()

    def _drop_lost(self) -> None:
        for identity in self.link.lost():
            count = 0
            if (owner := self.owners.drop(identity)) is not None:
                count = self.requests.abort_owner(owner)
            log.info("frontend %s is gone%s", name_of(identity), f"; aborted {count} of its sequences" if count else "")

    def _handle(self, identity: bytes, message: FrontendMessage) -> None:
        owner = self.owners.number(identity)
        match message:
            case AddRequest() if self.stopping:
                self.owners.refuse(owner, message.id, "overloaded", "the engine is shutting down")
            case AddRequest():
                self.requests.add(owner, message)
            case Utility():
                self.utilities.handle(owner, message, self.link.epoch)
            case Abort() | Finish() | MediaData() | MediaGone():
                self.requests.handle(owner, message)

    # ------------------------------------------------------------------------------------------------------ steps
    def _fill(self) -> None:
        while self.workers.is_ready and len(self._in_flight) < self._max_in_flight and self.scheduler.has_work:
            if self._masks or (made := self.scheduler.schedule(time.time())) is None:
                return
            plan, scheduled = made
            slots, now = self.scheduler.slots, time.monotonic()
            rows = (slots.wants_logprobs[scheduled.slots] & scheduled.samples).nonzero()[0]
            num_logprobs = slots.num_logprobs[scheduled.slots] if len(rows) else rows
            self._in_flight.append(InFlight(scheduled, now, rows, num_logprobs))
            self.workers.send_plan(plan.encode())
            if len(scheduled.mask_rows):
                self._grammar.expect(scheduled, self.supervisor.now)

    def _collect(self) -> bool:
        """Take and publish the oldest step's results; returns whether they were there."""
        if not self._in_flight or not self._is_done(self._in_flight[0]):
            return False
        done = self._in_flight.popleft()
        step, now = done.scheduled, time.monotonic()
        seconds = now - max(done.sent_at, self._last_result)
        self._expected.learn(step, seconds)
        self.requests.learn(step, seconds)
        self._last_result = now
        samples = self._tokens(step)
        if step.side_rows:
            self._pass_on_side_results(step)
        news = self._grammar.take(step, samples)
        out = self.scheduler.update(step, samples, now)
        if self._grammar.advance(news, out):
            self.stats.masks(time.monotonic() - now)
        logprobs: list[TokenLogprobs] = []
        if len(done.logprob_rows):
            logprobs = read_logprobs(out, self.workers.result_ring, step.step, done.num_logprobs)
        if self._in_flight and len(step.slots) <= PUBLISH_FIRST_ROWS:
            self._publish(out, logprobs)  # the workers have a step to work on, and a user may wait for a first token
            self._fill()
        else:
            try:
                self._fill()  # the workers go on while the results are sent
            finally:
                self._publish(out, logprobs)
        self.scheduler.register_filled_blocks()
        self.stats.step(len(step.slots), step.num_tokens, seconds, time.monotonic() - now, out.since_last)
        return True

    def _tokens(self, step: ScheduledStep) -> Samples:
        """The sampled tokens; 0 where no token could be sampled, which ends the request."""
        return self._without_token.end(step, self.workers.result_ring.samples(*step.size))

    def _is_done(self, step: InFlight) -> bool:
        s, workers = step.scheduled, self.workers
        is_ready = workers.result_ring.ready(*s.size, step.logprob_rows) and (not s.has_runs or workers.encoded.has_all(s))
        return is_ready and (not s.side_rows or s.step & STEP_MASK in self._side_results)

    def _publish(self, out: StepOutput, logprobs: list[TokenLogprobs]) -> None:
        for owner, message in messages_of(out, logprobs, self.link.epoch, self.config.tells_drafts):
            self.owners.send(owner, message)

    def _pass_on_side_results(self, step: ScheduledStep) -> None:
        """Send a step's side results, before its tokens. Raises WorkersFailed if they are not those that the plan asked for."""
        results = self._side_results.pop(step.step & STEP_MASK).results
        if sorted(row for result in results for row in result.rows) != sorted(step.side_rows):
            raise WorkersFailed("a worker's side results are not of the rows that have some")
        # results of requests that were aborted meanwhile are dropped: another request may have the id by now
        targets = {row: target for row, target in step.side_rows.items() if self.scheduler.slots.alive[step.slots[row]]}
        for owner, message in side_messages(results, targets, self.link.epoch):
            self.owners.send(owner, message)

    # ----------------------------------------------------------------------------------------------------- waiting
    def _wait(self) -> None:
        """Wait for a message, a result or the end of a process; at the latest until the next heartbeat."""
        now = time.monotonic()
        until_heartbeat = self._next_heartbeat - now
        if not self._in_flight:
            is_awake = self.config.spins and now - self._last_result < AWAKE_S
            self._poll(0.0 if is_awake else min(until_heartbeat, self.supervisor.until_start_s))
            self.workers.drain_doorbell()  # a late signal would wake this loop again and again
            return
        oldest = self._in_flight[0]
        if self._masks.due(oldest.scheduled.step):  # poll, do not spin: the threads that make its masks need the GIL
            self._poll(min(until_heartbeat, MASKS_LATE_S))
            return
        expected = max(oldest.sent_at, self._last_result) + self._expected.seconds(oldest.scheduled) - now
        if self.config.spins and -LATE_S < expected < SPIN_S:
            self._spin(oldest)
            return
        armed = self.workers.result_ring.arm(*oldest.scheduled.size, oldest.logprob_rows)
        if armed or not self._is_done(oldest):  # prompt logprobs come as a message, after the tokens
            self._poll(min(until_heartbeat, expected - SPIN_S) if self.config.spins and expected > SPIN_S else until_heartbeat)
        self.workers.result_ring.disarm()
        self.workers.result_ring.drain_doorbell()

    def _spin(self, step: InFlight) -> None:
        """Check the result ring SPIN_LOOKS times, then poll the sockets once."""
        ready, size = self.workers.result_ring.ready, step.scheduled.size
        for _ in range(SPIN_LOOKS):
            if ready(*size):
                return
        self._poll(0.0)

    def _poll(self, timeout_s: float) -> None:
        if (self._wake_fd, zmq.POLLIN) in self._poller.poll(int(max(timeout_s, 0.0) * 1000)):
            os.eventfd_read(self._wake_fd)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_INTERVAL_S
        parts = self.scheduler, self.requests, self.supervisor, self.workers, self.expert_load
        self.link.broadcast(self.stats.heartbeat(self.link.epoch, *parts))
        self.stats.log(now)
        self._on_heartbeat()

    # ----------------------------------------------------------------------------------------------------- workers
    def _watch_workers(self) -> None:
        for message in self.workers.messages():
            self._side_results[message.step] = message
        is_overdue = self.supervisor.check(self._in_flight[0].scheduled.step if self._in_flight else None)
        if is_overdue and not self._is_done(self._in_flight[0]):
            self.supervisor.fail_step()
        self._grammar.turn(self.supervisor.now)
        self.replay.turn(self.supervisor.now)
        self.expert_load.turn(self.stats.num_steps, self.supervisor.now)
        if self._wants_stacks:
            self._wants_stacks = False
            self.utilities.log_stacks()
        if not self.workers.is_ready and self.supervisor.start_if_due():
            self._poller = self._make_poller()

    def _replace_workers(self, why: str) -> None:
        """Plan a start of new workers, which run the requests in flight again (replay.py). Raises WorkersFailed."""
        from_outside = self.workers.kill()
        self._in_flight.clear()
        self._side_results.clear()
        self._grammar.clear()
        self.replay.workers_died(why, from_outside)
        self._last_result = 0.0
        self._poller = self._make_poller()
        self.supervisor.plan_start(why, from_outside)
