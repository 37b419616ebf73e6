"""ExpertLoad: how evenly tokens go to the ranks of expert parallelism, for /metrics.

While there are steps it asks the workers twice a second, by a control record (workers/expert_load.py answers), so that no step
waits for it. The first rank of each pipeline stage counts for the layers of its stage. Without --enable-expert-parallel it
does nothing. Owned by the core's loop.
"""

import logging
from collections import deque

import msgspec

from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.group import ReportExpertLoad
from quire.ipc.messages.stats import ExpertStats, ExpertTokens
from quire.ipc.messages.workers import ControlReply

log = logging.getLogger("quire.enginecore")

INTERVAL_S = 0.5
RECENT = 20  # answers of each stage that the ratio is computed from: ten seconds of work


class ExpertLoad:
    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._num_stages = workers.template.engine.pipeline_parallel_size
        size = workers.world_size // self._num_stages
        self._is_on = workers.template.engine.enable_expert_parallel and size > 1
        self._tokens = [0] * size
        self._recent: deque[ExpertTokens] = deque(maxlen=RECENT * self._num_stages)
        self._asked_at_step = 0
        self._next = 0.0
        self._num_unanswered = 0  # stages

    def turn(self, num_steps: int, now: float) -> None:
        """Ask, if it is time. num_steps: how many steps there were; now: seconds. Raises WorkersFailed."""
        if not self._is_on or num_steps == self._asked_at_step or now < self._next or self._num_unanswered:
            return
        if self._workers.is_ready:
            self._asked_at_step, self._next, self._num_unanswered = num_steps, now + INTERVAL_S, self._num_stages
            self._workers.send_control(ReportExpertLoad, self._take)

    def _take(self, reply: ControlReply) -> None:
        if reply.rank % len(self._tokens):
            return
        self._num_unanswered -= 1
        if reply.error:
            log.warning("tokens of experts could not be counted: %s", reply.error)
        elif reply.payload:  # else the stage has no experts
            load = msgspec.msgpack.decode(reply.payload, type=ExpertTokens)
            if any(load.by_rank):
                self._tokens = [a + b for a, b in zip(self._tokens, load.by_rank, strict=True)]
                self._recent.append(load)

    def so_far(self) -> ExpertStats | None:
        """The counts since the start; None without expert parallelism."""
        if not self._is_on:
            return None
        mean = sum(sum(load.by_rank) for load in self._recent) / len(self._tokens)
        busiest = sum(load.busiest for load in self._recent)
        return ExpertStats(self._tokens, busiest / mean if mean else 1.0)
