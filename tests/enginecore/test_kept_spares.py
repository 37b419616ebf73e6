"""Processes for the next workers are kept ready on a GPU: to load torch takes more than half of a restart."""

from typing import Literal

import msgspec
import pytest
from core_by_hand import FakeWorkers, worker_template

from quire.enginecore.worker_supervisor import SPARES_AFTER_S, WorkerSupervisor


class Workers(FakeWorkers):
    """They count how often spares are asked for."""

    num_asked = 0

    def keep_spares(self) -> None:
        self.num_asked += 1


@pytest.mark.parametrize(("device", "replay", "is_kept"), [("cuda", True, True), ("cpu", True, False), ("cuda", False, False)])
def test_spares_are_started_some_time_after_workers_are_ready(
    device: Literal["cuda", "cpu"], replay: bool, is_kept: bool
) -> None:
    template, now = worker_template(), [0.0]
    engine = msgspec.structs.replace(template.engine, device=device, replay=replay)
    workers = Workers(msgspec.structs.replace(template, engine=engine))
    workers.start()
    supervisor = WorkerSupervisor(workers, 60.0, lambda: now[0])

    def turns(seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            now[0] += 0.5
            supervisor.check(None)
            supervisor.start_if_due()

    turns(SPARES_AFTER_S - 1.0)
    assert workers.num_asked == 0  # the first requests need the CPU
    turns(2.0)
    assert workers.num_asked == is_kept
    workers.kill()
    supervisor.plan_start("it is broken")
    assert workers.num_asked == is_kept + 1  # those that are not there yet
    turns(SPARES_AFTER_S + 2.0)
    assert workers.num_asked == 2 * is_kept + 1
    workers.kill()
