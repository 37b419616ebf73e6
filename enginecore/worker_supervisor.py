"""WorkerSupervisor: watches the health of the workers, and decides when new ones start. The core's loop calls it each turn.

It owns the age of the oldest step, the limit of a restart and the pause before the next start; WorkerGroup has the processes,
and the core knows the requests that are lost with them. Nothing here waits: a start that is not due yet is looked at again in
the next turn, so that the loop sends heartbeats, takes requests and can be stopped meanwhile. Time is a LoopClock's: a freeze
of the whole machine makes neither a step nor a start older.
"""

import logging
import math
import time
from collections.abc import Callable

import zmq

from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.workers import WorkerGroup
from quire.ipc.process.loop_clock import LoopClock
from quire.ipc.process.restarts import LIVED_WELL_S, Restarts, restart_limit_s

log = logging.getLogger("quire.enginecore")

STOPPED_LOOK_S = 0.4  # between looks for stopped workers: each turn of a waiting loop has one, not each turn of a busy one
SAY_EVERY_S = 30.0  # between log lines that workers are still starting
DYING_LOOK_S = 0.05  # between looks at killed workers that are not gone; heartbeats alone would wake the loop less often
SPARES_AFTER_S = 10.0  # from workers that are ready to spares of the next ones on GPUs: loading torch takes a core for 3 s
DYING_LIMIT_S = 30.0  # how long successors wait for killed workers to be gone: until then their memory is not free


class WorkerSupervisor:
    """Watches one WorkerGroup, which was started before. num_restarts: how often its workers were replaced."""

    def __init__(self, workers: WorkerGroup, step_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_restarts = 0
        self._workers = workers
        self._step_timeout_s = step_timeout_s
        # Workers that die of their first step, or soon without one, count as a failed start: otherwise they would be started
        # for ever, and fail the running requests each time.
        self._restarts = Restarts(first_pause_s=0.0)
        self.on_served: Callable[[], None] = lambda: None  # called once for each generation, with its first step
        self._has_served = False
        self._clock = LoopClock(clock)
        self._step: int | None = None
        self._step_since = 0.0
        self._start_due: float | None = None  # when to start workers; set while there are none
        self._started_at = self._say_at = self._look_at = 0.0
        self._was_ready = True
        self._ready_at: float | None = self.now
        engine = workers.template.engine
        self._keeps_spares = engine.device == "cuda" and engine.replay  # more than half of an 8B's restart loads torch
        self._spares_due = self.now + SPARES_AFTER_S if self._keeps_spares else math.inf

    # -------------------------------------------------------------------------------------------------- every turn
    def check(self, oldest_step: int | None) -> bool:
        """Advance the clock and look at the workers; returns whether the oldest step is overdue. After WorkerGroup.messages.

        oldest_step: the number of the step that has been in flight for the longest, None without one. Raises WorkersFailed if a
        worker has ended, is stopped, or takes too long to start.
        """
        self._clock.tick()
        if oldest_step != self._step:
            if self._step is not None and not self._has_served:
                self._has_served = True
                self._restarts.served()
                self.on_served()
            self._step, self._step_since = oldest_step, self.now
        self._workers.check_alive()
        if self.now >= self._look_at:
            self._look_at = self.now + STOPPED_LOOK_S
            self._workers.check_stopped("there is nothing to do" if oldest_step is None else "a step is in flight")
        if not self._was_ready and self._start_due is None:
            self._check_start()
        if self.now >= self._spares_due:
            self._spares_due = math.inf
            self._workers.keep_spares()
        return oldest_step is not None and self.now - self._step_since > self._step_timeout_s

    @property
    def now(self) -> float:
        """Seconds in which the loop was running."""
        return self._clock.now

    @property
    def oldest_step_s(self) -> float:
        """For how long the oldest step has been the oldest."""
        return 0.0 if self._step is None else self.now - self._step_since

    def fail_step(self) -> None:
        """Give up the oldest step: raises WorkersFailed, after the workers' stacks were logged."""
        stopped = ", ".join(f"worker {rank} is stopped" for rank in self._workers.stopped())
        self._workers.dump_stacks()
        why = f"a step took longer than --step-timeout-s ({self._step_timeout_s:g} s)"
        raise WorkersFailed(f"{why}: {stopped}" if stopped else why)

    # ---------------------------------------------------------------------------------------------------- restarts
    def plan_start(self, why: str, from_outside: bool = False) -> None:
        """The workers were killed: plan the start of others. from_outside: a signal from outside had ended or stopped one of
        them. Raises WorkersFailed to give up."""
        self.num_restarts += 1
        if self._ready_at is not None and self._step is None and self.now - self._ready_at >= LIVED_WELL_S:
            self._restarts.ready(self._ready_at)
        self._ready_at = None
        pause_s = self._restarts.ended(self.now, from_outside)
        if pause_s is None:
            raise WorkersFailed(f"the workers failed to start, or soon after, several times in a row: {why}")
        if pause_s > 0:
            log.info("the workers start again in %.0f s", pause_s)
        self._start_due, self._was_ready, self._has_served, self._step = self.now + pause_s, False, False, None
        self._spares_due = math.inf
        self._workers.keep_spares()  # they load their modules during the pause, and while killed ones are waited for

    @property
    def until_start_s(self) -> float:
        """How long the loop may wait before the next start."""
        return math.inf if self._start_due is None else max(self._start_due - self.now, DYING_LOOK_S)

    def start_if_due(self) -> bool:
        """Start workers if it is time; returns whether it did, and the loop must poll them. Raises WorkersFailed."""
        due = self._start_due
        if due is None or self.now < due:
            return False
        if left := self._workers.dying():
            if self.now < due + DYING_LIMIT_S:
                return False
            log.error("killed %.0f s ago and still not gone: %s; others start beside them", DYING_LIMIT_S, ", ".join(left))
        self._start_due, self._started_at, self._say_at = None, self.now, self.now + SAY_EVERY_S
        try:
            self._workers.start()
        except (OSError, zmq.ZMQError) as error:
            raise WorkersFailed(f"the workers' processes cannot be started: {error}") from error
        return True

    def _check_start(self) -> None:
        workers, waited_s = self._workers, self.now - self._started_at
        if workers.is_ready:
            self._was_ready, self._ready_at = True, self.now
            if self._keeps_spares:
                self._spares_due = self.now + SPARES_AFTER_S
            log.info("workers are ready again after %.1f s", workers.start_s)
            return
        limit_s = restart_limit_s(workers.start_s)
        if waited_s > limit_s:
            workers.dump_stacks()
            raise WorkersFailed(f"the workers did not start again within {limit_s:.0f} s (they should {workers.start_stage})")
        if self.now >= self._say_at:
            self._say_at += SAY_EVERY_S
            log_slow_start(workers, waited_s)


def log_slow_start(workers: WorkerGroup, waited_s: float) -> None:
    """Log what workers that take long to start are doing."""
    log.info("the workers are still starting after %.0f s: they %s", waited_s, workers.start_stage)
