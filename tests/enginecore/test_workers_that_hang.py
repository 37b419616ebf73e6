"""Workers that do not end when they are killed, or do not answer: all are waited for together, and not for ever."""

import signal
from types import SimpleNamespace

import pytest
from core_by_hand import worker_template

from quire.enginecore.silent_ranks import SilentRanks
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.workers import WorkerGroup
from quire.ipc.process import children as children_module


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Unkillable:
    """A child in an uninterruptible sleep."""

    def __init__(self, pid: int, clock: Clock) -> None:
        self.pid, self.signals, self.has_ended, self.is_closed, self.clock = pid, list[int](), False, False, clock
        self.patience = list[float]()  # that it was waited for with

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def poll(self) -> int | None:
        return -9 if self.has_ended else None

    def is_stopped(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> int | None:
        self.patience.append(timeout_s)
        self.clock.now += 0.0 if self.has_ended else max(timeout_s, 0.0)
        return self.poll()

    def close(self) -> None:
        self.is_closed = True


def waited_for_together(children: list[Unkillable]) -> bool:
    (first,), *rest = [child.patience for child in children]
    return first > 0.0 and all(patience <= 0.0 for (patience,) in rest)  # the first has used the time up


def test_killed_workers_are_waited_for_together_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(children_module, "time", SimpleNamespace(monotonic=(clock := Clock())))
    workers = WorkerGroup(worker_template(4))
    children = [Unkillable(pid, clock) for pid in range(1, 5)]
    workers._children = list(children)
    children[1].has_ended = True
    workers.kill()
    assert waited_for_together(children)
    assert all(child.signals == [signal.SIGKILL] and child.is_closed for child in children)
    assert workers.dying() == ["pid 1", "pid 3", "pid 4"]
    for child in children:
        child.has_ended = True
    assert workers.dying() == []


def test_workers_that_hang_write_their_stacks_at_the_same_time(monkeypatch):
    monkeypatch.setattr(children_module, "time", SimpleNamespace(monotonic=(clock := Clock())))
    workers = WorkerGroup(worker_template(4))
    workers._children = [Unkillable(pid, clock) for pid in range(1, 5)]
    workers.dump_stacks()
    assert waited_for_together(workers._children)
    assert all(child.signals == [signal.SIGUSR1] for child in workers._children)


class Stopped(Unkillable):
    """A child that a signal has stopped."""

    def is_stopped(self) -> bool:
        return True


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_worker_that_is_stopped_is_found_whether_or_not_others_wait_for_it(world_size):
    """With one rank it was found by the age of its step alone, after a minute."""
    workers, clock = WorkerGroup(worker_template(world_size)), Clock()
    workers._children = [Stopped(pid, clock) for pid in range(1, world_size + 1)]
    workers._silent, workers.is_ready, looks = SilentRanks(10.0, clock=clock), True, 0
    with pytest.raises(WorkersFailed, match=r"stopped by a signal 8.5 s ago, and a step is in flight"):
        while looks < 25:
            workers.check_stopped("a step is in flight")
            looks, clock.now = looks + 1, clock.now + 0.5
