"""Workers that die, hang, do not start or cannot be killed, by a clock that the test moves; their processes are doubles."""

import errno
import logging
import math
import os
import time

import pytest
import zmq
from core_by_hand import add, worker_template

from quire.enginecore import workers as group_module
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.worker_supervisor import DYING_LIMIT_S, DYING_LOOK_S, SAY_EVERY_S, WorkerSupervisor
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import Heartbeat, RequestError, StepOutputs
from quire.ipc.process.loop_clock import MAX_TICK_S
from quire.ipc.process.restarts import LIVED_WELL_S, MAX_FAILED_STARTS, MAX_KILLED_STARTS, MAX_SHORT_LIVES, START_LIMIT_S

STEP_TIMEOUT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Group:
    """What a supervisor asks a WorkerGroup."""

    def __init__(self) -> None:
        self.template = worker_template()
        self.is_ready, self.start_s, self.start_stage = True, 7.0, "load the model"
        self.num_starts, self.num_dumps, self.num_spares = 0, 0, 0
        self.looks: list[str] = []  # for stopped workers
        self.left: list[str] = []  # killed and not gone
        self.are_stopped: list[int] = []

    def check_alive(self) -> None:
        pass

    def check_stopped(self, meanwhile: str) -> None:
        self.looks.append(meanwhile)

    def dying(self) -> list[str]:
        return self.left

    def keep_spares(self) -> None:
        self.num_spares = 2

    def start(self) -> None:
        self.num_starts += 1

    def dump_stacks(self) -> None:
        self.num_dumps += 1

    def stopped(self) -> list[int]:
        return self.are_stopped


class Watched:
    """A supervisor whose loop turns by the test's clock."""

    def __init__(self) -> None:
        self.group, self.clock = Group(), Clock()
        self.supervisor = WorkerSupervisor(self.group, STEP_TIMEOUT_S, self.clock)  # type: ignore[arg-type]

    def turn(self, seconds: float = 0.5, step: int | None = None) -> bool:
        """A turn of the core's loop; whether the step is overdue."""
        self.clock.now += seconds
        is_overdue = self.supervisor.check(step)
        self.supervisor.start_if_due()
        return is_overdue

    def serve(self) -> None:
        """The workers get ready, and a step returns."""
        self.group.is_ready = True
        self.turn()
        self.turn(step=1)
        self.turn()

    def fail(self, from_outside: bool = False) -> None:
        self.group.is_ready = False
        self.supervisor.plan_start("it is broken", from_outside)

    def seconds_to_start(self) -> float:
        began, starts = self.clock.now, self.group.num_starts
        while self.group.num_starts == starts:
            self.turn(0.25)
            assert self.clock.now - began < 1000.0
        return self.clock.now - began


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def log(caplog, monkeypatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")
    return caplog


# ------------------------------------------------------------------------------------------------------------- starts
def test_starts_that_fail_are_tried_again_after_pauses_that_double_and_then_given_up(watched, log):
    watched.serve()
    watched.fail()
    assert watched.seconds_to_start() <= 0.25  # what served is replaced at once
    for pause_s in (1.0, 2.0, 4.0):
        watched.fail()
        assert pause_s <= watched.seconds_to_start() <= pause_s + 0.25
    assert log.messages == [f"the workers start again in {s} s" for s in (1, 2, 4)]
    with pytest.raises(WorkersFailed, match="several times in a row: it is broken"):
        watched.fail()
    assert watched.group.num_starts == MAX_FAILED_STARTS


def test_workers_that_are_killed_in_their_restarts_are_back_at_once_but_not_for_ever(watched):
    for _ in range(3):
        watched.serve()
        for _ in range(1 + MAX_KILLED_STARTS):
            watched.fail(from_outside=True)
            assert watched.seconds_to_start() <= 0.25
    for pause_s in (1.0, 2.0, 4.0):
        watched.fail(from_outside=True)
        assert pause_s <= watched.seconds_to_start() <= pause_s + 0.25
    with pytest.raises(WorkersFailed, match="several times in a row"):
        watched.fail(from_outside=True)


def test_a_machine_without_room_for_a_process_is_a_start_that_fails(watched, monkeypatch):
    def start() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(watched.group, "start", start)
        watched.fail()
        with pytest.raises(WorkersFailed, match=r"cannot be started: .*temporarily unavailable"):
            watched.turn()
    watched.fail()
    assert 1.0 <= watched.seconds_to_start() <= 1.25


def test_a_start_that_succeeds_forgets_the_failures_before(watched, log):
    watched.serve()
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS):
            watched.fail()
            watched.seconds_to_start()
        watched.serve()
    assert log.messages.count("workers are ready again after 7.0 s") == 3
    assert watched.supervisor.num_restarts == 3 * MAX_FAILED_STARTS


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_workers_that_die_of_their_first_step_are_given_up_however_long_they_waited_for_it(watched, idle_s):
    watched.serve()
    for pause_s in (0.0, 1.0, 2.0, 4.0):
        watched.turn(step=7)
        watched.fail()
        assert pause_s <= watched.seconds_to_start() <= pause_s + 0.25
        watched.group.is_ready = True
        for _ in range(int(idle_s)):
            watched.turn(1.0)
    watched.turn(step=7)
    with pytest.raises(WorkersFailed, match="soon after, several times in a row: it is broken"):
        watched.fail()


def test_workers_that_die_soon_without_a_request_are_started_ever_later_and_then_given_up(watched):
    pauses = []
    for _ in range(MAX_FAILED_STARTS - 1):
        watched.fail()
        pauses.append(watched.seconds_to_start())
        watched.group.is_ready = True
        watched.turn()
    assert [int(pause_s) for pause_s in pauses] == [0, 1, 2]
    with pytest.raises(WorkersFailed, match="several times in a row"):
        watched.fail()


@pytest.mark.parametrize("serves", [True, False])
def test_workers_that_have_served_or_lived_long_are_replaced_at_once(watched, serves):
    for _ in range(3 * MAX_SHORT_LIVES):
        if serves:
            watched.serve()
        else:
            watched.group.is_ready = True
            for _ in range(int(LIVED_WELL_S) + 1):
                watched.turn(1.0)
        watched.fail()
        assert watched.seconds_to_start() <= 0.25


def test_workers_that_hang_while_they_restart_are_spoken_of_and_then_failed(watched, log):
    watched.fail()
    watched.seconds_to_start()
    for _ in range(int(START_LIMIT_S)):
        watched.turn(1.0)
    lines = [f"the workers are still starting after {n * SAY_EVERY_S:.0f} s: they load the model" for n in range(1, 11)]
    assert log.messages == lines and watched.group.num_dumps == 0
    with pytest.raises(WorkersFailed, match=r"did not start again within 300 s \(they should load the model"):
        watched.turn(1.0)
    assert watched.group.num_dumps == 1


def test_workers_that_took_long_before_may_take_long_again(watched):
    watched.group.start_s = 90.0
    watched.fail()
    watched.seconds_to_start()
    for _ in range(900):
        watched.turn(1.0)
    with pytest.raises(WorkersFailed, match="within 900 s"):
        watched.turn(1.0)


def test_successors_wait_for_those_before_to_be_gone_but_not_for_ever(watched, log):
    watched.group.left = ["pid 17"]
    watched.fail()
    for _ in range(20):
        watched.turn()
    assert watched.group.num_starts == 0
    watched.group.left = []
    assert watched.seconds_to_start() <= 0.25
    watched.group.is_ready = True
    watched.turn()
    watched.fail()
    watched.group.left = ["pid 17", "pid 18"]
    assert DYING_LIMIT_S <= watched.seconds_to_start() <= DYING_LIMIT_S + 1.25
    assert "still not gone: pid 17, pid 18" in log.messages[-1]


# -------------------------------------------------------------------------------------------------------------- steps
def test_a_step_is_overdue_after_its_time_and_the_next_one_begins_anew(watched):
    watched.turn(step=1)
    for _ in range(100):
        assert not watched.turn(step=1)
    assert watched.supervisor.oldest_step_s == 50.0
    assert not watched.turn(step=2) and watched.supervisor.oldest_step_s == 0.0
    for _ in range(120):
        assert not watched.turn(step=2)
    assert watched.turn(step=2)
    assert not watched.turn() and watched.supervisor.oldest_step_s == 0.0
    with pytest.raises(WorkersFailed, match=r"--step-timeout-s \(60 s\)$"):
        watched.supervisor.fail_step()
    watched.group.are_stopped = [1]
    with pytest.raises(WorkersFailed, match=r"--step-timeout-s \(60 s\): worker 1 is stopped$"):
        watched.supervisor.fail_step()
    assert watched.group.num_dumps == 2


def test_stopped_workers_are_looked_for_a_few_times_a_second_in_a_step_and_without_one(watched):
    for _ in range(10):
        watched.turn(0.1)
    assert watched.group.looks == ["there is nothing to do"] * 3
    for _ in range(8):
        watched.turn(0.1, step=1)
    assert watched.group.looks[3:] == ["a step is in flight"] * 2


def test_a_freeze_of_the_machine_ages_neither_a_step_nor_a_start(watched):
    watched.turn(step=1)
    assert not watched.turn(10 * STEP_TIMEOUT_S, step=1)
    assert watched.supervisor.oldest_step_s == MAX_TICK_S
    watched.fail()
    watched.seconds_to_start()
    watched.turn(10 * START_LIMIT_S)


def test_after_a_freeze_a_healthy_worker_goes_on_in_the_core(by_hand, monkeypatch):
    core, frontend, clock = by_hand.core, by_hand.frontend(), Clock()
    core.supervisor = WorkerSupervisor(by_hand.workers, STEP_TIMEOUT_S, clock)
    frontend.send(add(1, max_tokens=9))
    with monkeypatch.context() as frozen:
        frozen.setattr(by_hand.workers, "answer", lambda: None)
        by_hand.until(lambda: core._in_flight)
        by_hand.turn()
        clock.now += 10 * STEP_TIMEOUT_S
        by_hand.turn()
    while not by_hand.answer(frontend, StepOutputs).finished:
        pass
    assert by_hand.workers.generation == 1


# ------------------------------------------------------------------------------------------------- the loop meanwhile
def test_the_core_heartbeats_and_takes_requests_while_its_workers_wait_for_their_next_start(by_hand):
    core, clock = by_hand.core, Clock()
    core.supervisor = WorkerSupervisor(by_hand.workers, STEP_TIMEOUT_S, clock)
    for why in ("one", "two"):  # the second time before the successors were seen to be ready
        core._replace_workers(why)
    core._next_heartbeat = time.monotonic() + 0.1
    core._wait()  # for the next heartbeat, and nothing else
    frontend = by_hand.frontend()
    frontend.send(add(1, max_tokens=5))
    assert by_hand.answer(frontend, Heartbeat).ready is False
    by_hand.until(lambda: len(core.scheduler.waiting) == 1)
    assert by_hand.workers.generation == 1
    clock.now += 0.9
    by_hand.turn()
    clock.now += 0.9
    while not by_hand.answer(frontend, StepOutputs).finished:
        pass
    assert by_hand.workers.generation == 2 and core.supervisor.num_restarts == 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_stop_does_not_wait_for_steps_that_nobody_waits_for(by_hand, monkeypatch, waits):
    core, frontend = by_hand.core, by_hand.frontend()
    monkeypatch.setattr(by_hand.workers, "answer", lambda: None)  # it hangs
    frontend.send(add(1, max_tokens=9))
    by_hand.until(lambda: core._in_flight)
    if not waits:
        frontend.socket.close(linger=0)
        by_hand.until(lambda: not core.owners)
    assert not core.scheduler.is_idle
    core._next_heartbeat = time.monotonic() + 0.3
    began = time.monotonic()
    core.stop(0.3 if waits else 60.0)
    core.run()
    assert 0.3 * waits <= time.monotonic() - began < 30.0


def test_a_failed_request_hears_of_it_before_its_engine_gives_up(without_replay):
    by_hand = without_replay
    core, frontend = by_hand.core, by_hand.frontend()
    core.supervisor = WorkerSupervisor(by_hand.workers, STEP_TIMEOUT_S, Clock())
    frontend.send(add(1, max_tokens=50))
    by_hand.until(lambda: core._in_flight)
    for _ in range(MAX_FAILED_STARTS - 1):
        core._replace_workers("broken")
    with pytest.raises(WorkersFailed, match="several times in a row: broken"):
        core._replace_workers("broken")
    while not frontend.ready():
        pass
    assert by_hand.answer(frontend, RequestError).code == "engine_error"


def test_requests_of_workers_that_die_of_each_first_step_fail_one_by_one_until_the_engine_ends(without_replay, monkeypatch):
    by_hand = without_replay

    def die() -> None:
        if by_hand.workers.is_ready and by_hand.workers._reader.read(0.0) is not None:
            raise WorkersFailed("worker 0 ended unexpectedly (signal SIGSEGV)")

    core, frontend, clock = by_hand.core, by_hand.frontend(), Clock()
    core.supervisor = WorkerSupervisor(by_hand.workers, STEP_TIMEOUT_S, clock)
    monkeypatch.setattr(by_hand.workers, "answer", die)
    waits: list[float] = []
    for number in range(1, MAX_FAILED_STARTS + 1):
        frontend.send(add(number, max_tokens=50))
        began = clock.now
        with pytest.raises(WorkersFailed, match="SIGSEGV") as death:
            while True:
                by_hand.turn()
                clock.now += 0.01 * core.scheduler.has_requests  # not while its message travels
        waits.append(round(clock.now - began))
        if number < MAX_FAILED_STARTS:
            core._replace_workers(str(death.value))
            assert by_hand.answer(frontend, RequestError).id == number
    assert waits == [0, 0, 1, 2]  # the second time at once, then later and later: it is no server that frontends call well
    with pytest.raises(WorkersFailed, match="several times in a row: worker 0 ended"):
        core._replace_workers(str(death.value))


def test_the_next_workers_processes_begin_during_a_pause():
    watched = Watched()
    watched.turn(600.0)
    assert watched.group.num_spares == 0 and watched.supervisor.until_start_s == math.inf
    watched.supervisor.plan_start("worker 0 ended")
    assert (watched.group.num_spares, watched.group.num_starts) == (2, 0)
    watched.group.left = ["pid 7"]
    watched.turn()
    assert watched.group.num_starts == 0 and watched.supervisor.until_start_s == DYING_LOOK_S


def test_a_start_that_lacks_descriptors_is_a_failed_start_and_leaves_none_open(monkeypatch):
    def no_socket(generation):
        raise zmq.ZMQError(errno.EMFILE)

    workers, clock = WorkerGroup(worker_template(1, "")), Clock()
    supervisor = WorkerSupervisor(workers, STEP_TIMEOUT_S, clock)
    monkeypatch.setattr(workers, "keep_spares", lambda: None)
    supervisor.plan_start("worker 0 ended")
    monkeypatch.setattr(group_module, "CoreToWorkers", no_socket)
    before = len(os.listdir("/proc/self/fd"))
    clock.now += 60.0
    supervisor.check(None)
    with pytest.raises(WorkersFailed, match="cannot be started"):
        supervisor.start_if_due()
    assert len(os.listdir("/proc/self/fd")) == before
    workers.kill()
