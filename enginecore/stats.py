"""Statistics: counts about the core's steps, the heartbeat that carries them, and the line logged every 10 s.

The loop (core.py) calls it once a step, and once more for a step with grammar masks: an index and two additions for each
distribution, a few calls of numpy for the one that has a value for each row. It asks the scheduler and the workers only when a
heartbeat is due.
"""

import logging
import os
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from quire.enginecore.expert_load import ExpertLoad
from quire.enginecore.requests import Requests
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.worker_supervisor import WorkerSupervisor
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import Heartbeat
from quire.ipc.messages.stats import (
    BATCH_FILL,
    HOST_SECONDS,
    ITERATION_TOKENS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    Distribution,
    EngineStats,
    ExpertStats,
    SpeculationStats,
    TenantStats,
)
from quire.ipc.process.usage import process_usage

log = logging.getLogger("quire.enginecore")

INTERVAL_S = 10.0


class Counted:
    """A distribution that is being counted. bounds: as in ipc/messages/stats.py."""

    __slots__ = ("_array", "_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._array = bounds, np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: np.ndarray) -> None:
        """Count floats [n], but no NaN. In most steps all values are equal: those take 2 us, others 10."""
        if not len(values):
            return
        first = float(values[0])
        if (values == first).all():
            self._counts[bisect_left(self._bounds, first)] += len(values)
            self._sum += first * len(values)
            return
        values = values[values == values]  # no NaN
        new = np.bincount(np.searchsorted(self._array, values), minlength=len(self._counts))
        self._counts = [a + b for a, b in zip(self._counts, new.tolist(), strict=True)]
        self._sum += float(values.sum())

    def so_far(self) -> Distribution:
        return Distribution(self._counts.copy(), self._sum)


class Statistics:
    """log_stats: whether there is a line every INTERVAL_S. max_num_seqs: rows of a full batch."""

    def __init__(self, log_stats: bool, max_num_seqs: int) -> None:
        self._line = StatsLine(log_stats)
        self._max_num_seqs = max_num_seqs
        self._iteration_tokens = Counted(ITERATION_TOKENS)
        self._step_time = Counted(STEP_SECONDS)
        self._host_time = Counted(HOST_SECONDS)
        self._mask_time = Counted(HOST_SECONDS)
        self._batch_fill = Counted(BATCH_FILL)
        self._inter_token = Counted(TOKEN_SECONDS)
        self._last_heartbeat: Heartbeat | None = None
        self.num_steps = 0

    def step(self, num_rows: int, num_tokens: int, seconds: float, host_s: float, since_last: np.ndarray) -> None:
        """A step's result was published. seconds: the step's time on the workers; host_s: the loop's time for it since then;
        since_last: as in StepOutput."""
        self.num_steps += 1
        self._line.step(num_rows, num_tokens)
        self._iteration_tokens.observe(num_tokens)
        self._step_time.observe(seconds)
        self._host_time.observe(host_s)
        self._batch_fill.observe(num_rows / self._max_num_seqs)
        self._inter_token.observe_all(since_last)

    def masks(self, seconds: float) -> None:
        """The grammar masks of one step were computed."""
        self._mask_time.observe(seconds)

    def heartbeat(
        self,
        epoch: int,
        scheduler: Scheduler,
        requests: Requests,
        supervisor: WorkerSupervisor,
        workers: WorkerGroup,
        expert_load: ExpertLoad,
    ) -> Heartbeat:
        c, preparing = scheduler.counters, requests.preparing
        self._last_heartbeat = Heartbeat(
            epoch=epoch,
            oldest_step_s=supervisor.oldest_step_s,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting) + preparing.num_sequences,
            kv_usage=scheduler.kv.pool.usage,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            generation_tokens=c.generation_tokens,
            preemptions=c.preemptions,
            worker_restarts=supervisor.num_restarts,
            ready=workers.is_ready,
            stats=self._message(
                preparing.num_sequences,
                workers.pids,
                expert_load.so_far(),
                requests.backlog.stats(),
                c.windows.so_far(),
            ),
            replays=c.replays,
            replays_given_up=c.replays_given_up,
            num_states=max(scheduler.kv.states.num_states - 1, 0),
            states_used=scheduler.kv.states.num_used,
            adapters=requests.adapters.stats() if requests.adapters is not None else None,
        )
        return self._last_heartbeat

    def _message(
        self,
        num_deferred: int,
        worker_pids: Sequence[int],
        experts: ExpertStats | None,
        tenants: list[TenantStats],
        speculation: SpeculationStats | None,
    ) -> EngineStats:
        names = {os.getpid(): "engine"} | {pid: f"worker-{rank}" for rank, pid in enumerate(worker_pids)}
        return EngineStats(
            num_deferred=num_deferred,
            iteration_tokens=self._iteration_tokens.so_far(),
            step_time=self._step_time.so_far(),
            host_time=self._host_time.so_far(),
            mask_time=self._mask_time.so_far(),
            batch_fill=self._batch_fill.so_far(),
            inter_token=self._inter_token.so_far(),
            processes=[usage for pid, name in names.items() if (usage := process_usage(pid, name)) is not None],
            experts=experts,
            tenants=tenants,
            speculation=speculation,
        )

    def log(self, now: float) -> None:
        """Call it after `heartbeat`. now: seconds of a monotonic clock."""
        if self._last_heartbeat is not None:
            self._line.heartbeat(self._last_heartbeat, now)


class StatsLine:
    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._since: tuple[float, Heartbeat] | None = None
        self._steps = self._rows = self._tokens = 0

    def step(self, num_rows: int, num_tokens: int) -> None:
        self._steps += 1
        self._rows += num_rows
        self._tokens += num_tokens

    def heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Log a line if one is due. now: seconds of a monotonic clock."""
        if not self._enabled:
            return
        if self._since is None:
            self._since = (now, heartbeat)
        since, before = self._since
        if now - since < INTERVAL_S:
            return
        if self._steps:
            log.info(self._line(before, heartbeat, now - since))
        self._since = (now, heartbeat)
        self._steps = self._rows = self._tokens = 0

    def _line(self, a: Heartbeat, b: Heartbeat, seconds: float) -> str:
        prompt = b.prompt_tokens - a.prompt_tokens
        hits = (b.cached_tokens - a.cached_tokens) / prompt if prompt else 0.0
        generated = b.generation_tokens - a.generation_tokens
        return (
            f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
            f"running {b.num_running}, waiting {b.num_waiting}, KV cache {b.kv_usage:.1%}, prefix hits {hits:.1%}, "
            f"{self._steps / seconds:.1f} steps/s of {self._rows / self._steps:.1f} rows, "
            f"preempted {b.preemptions - a.preemptions}" + _drafts(a, b)
        )


def _drafts(a: Heartbeat, b: Heartbeat) -> str:
    """The log's words about the drafts between two heartbeats; "" without any."""
    if a.stats is None or b.stats is None or a.stats.speculation is None or b.stats.speculation is None:
        return ""
    said = b.stats.speculation.since(a.stats.speculation).in_words()
    return f", {said}" if said else ""


class Expected:
    """How long steps take, by running means: of a step of decode rows, and of a token of steps with prompts. No clock.

    From it the core's loop knows when the next result is due and how long it may sleep.
    """

    def __init__(self) -> None:
        self._decode_s = self._token_s = 0.0

    def learn(self, step: ScheduledStep, seconds: float) -> None:
        if step.prefills:
            self._token_s += 0.2 * (seconds / step.num_tokens - self._token_s)
        else:
            self._decode_s += 0.2 * (seconds - self._decode_s)

    def seconds(self, step: ScheduledStep) -> float:
        return self._token_s * step.num_tokens if step.prefills else self._decode_s
