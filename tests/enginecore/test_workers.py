"""WorkerGroup with two worker processes under a core: every rank gets every plan, one answers, both live and die together.

The processes are tests/support/fake_worker.py; rings, control link and deaths are real.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import core_by_hand
import msgspec
import numpy as np
import pytest
from core_by_hand import MAX_NUM_SEQS, VOCAB_SIZE, CoreByHand, add, worker_template
from deadlines import DEADLINE_S
from fake_worker import log_of, solo_output

from quire.enginecore import workers as group
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.workers import WorkerGroup
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.messages.frontend import StepOutputs
from quire.ipc.messages.workers import ControlReply, DumpStacks, WorkerFailed, WorkerReady
from quire.ipc.step.plan_ring import KIND_PLAN, PlanRing
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER
from quire.workers.worker import Worker

TIMEOUT_S = DEADLINE_S


class TwoWorkers(CoreByHand):
    """A core by hand with a group of two processes; `sent` holds the plans as they went into the ring."""

    def __init__(self, folder: Path) -> None:
        super().__init__(WorkerGroup(worker_template(2, str(folder))))
        self.folder = folder

    def turn(self) -> None:
        """The loop's body as in EngineCore.run, a death included."""
        try:
            super().turn()
            self.core._poll(0.01)
        except WorkersFailed as error:
            self.core._replace_workers(str(error))

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it has not happened in time"
            self.turn()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.workers._children]

    def plans_of(self, rank: int, generation: int = 1) -> list[str]:
        log = log_of(self.folder, generation, rank)
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def run_request(self, request_id: int, num_tokens: int, max_tokens: int) -> list[int]:
        """The tokens of a request, from its frontend's side."""
        frontend, tokens, ended = self.frontend(), list[int](), False
        frontend.send(add(request_id, num_tokens, max_tokens=max_tokens))
        while not ended:
            message = self.answer(frontend, StepOutputs)
            tokens += np.frombuffer(message.tokens, np.int32).tolist()
            ended = bool(message.finished)
        return tokens


@pytest.fixture
def two(tmp_path, monkeypatch) -> Iterator[TwoWorkers]:
    monkeypatch.setenv("PYTHONPATH", str(Path(core_by_hand.__file__).parent), prepend=os.pathsep)  # where fake_worker is
    monkeypatch.setattr(group, "WORKER_MODULE", "fake_worker")
    two = TwoWorkers(tmp_path)
    try:
        two.wait_until(lambda: two.workers.is_ready)
        yield two
    finally:
        two.close()


def alone(num_tokens: int, max_tokens: int) -> list[int]:
    return solo_output([i % VOCAB_SIZE for i in range(num_tokens)], num_tokens + max_tokens, set(), VOCAB_SIZE)


def test_both_ranks_get_each_plan_and_rank_0_answers(two):
    assert two.workers.profile.num_blocks == 60  # the least of both; successors must have as many
    assert [two.workers._config(rank).engine.num_gpu_blocks_override for rank in (0, 1)] == [60, 60]
    assert two.run_request(1, 20, 9) == alone(20, 9)
    steps = two.core.scheduler._step
    two.wait_until(lambda: len(two.plans_of(0)) == len(two.plans_of(1)) == steps)
    assert two.plans_of(0) == two.plans_of(1) and len(set(two.plans_of(0))) == steps >= 10


def test_processes_that_are_kept_ready_are_the_next_workers(two):
    workers = two.workers
    for _ in range(2):  # the second time there are enough
        workers.keep_spares()
    well, dead = (child.pid for child in workers._spares._children)
    os.kill(dead, signal.SIGKILL)
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)  # one that is still dying would be taken, and found dead later
    os.kill(two.pids[1], signal.SIGKILL)
    two.wait_until(lambda: workers.generation == 2 and workers.is_ready)
    assert two.pids[0] == well and two.pids[1] != dead and len(workers._spares) == 0
    assert two.run_request(1, 20, 9) == alone(20, 9)
    workers.keep_spares()
    spares = list(workers._spares._children)
    workers.stop()
    assert len(spares) == 2 and all(spare.poll() is not None for spare in spares)


def test_the_results_are_rank_0s_and_a_slow_rank_reads_later_what_it_has_missed(two):
    assert two.run_request(1, 5, 3) == alone(5, 3)
    two.wait_until(lambda: two.plans_of(1) == two.plans_of(0) and len(two.plans_of(0)) == two.core.scheduler._step)
    before = two.plans_of(1)
    os.kill(two.pids[1], signal.SIGSTOP)
    try:
        assert two.run_request(2, 7, 20) == alone(7, 20)
        assert two.plans_of(1) == before
    finally:
        os.kill(two.pids[1], signal.SIGCONT)
    two.wait_until(lambda: len(two.plans_of(1)) == two.core.scheduler._step)
    assert two.plans_of(1) == two.plans_of(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_either_rank_replaces_both_and_all_goes_on(two, rank):
    core, before = two.core, two.pids
    running = [two.frontend() for _ in range(2)]
    for frontend in running:
        frontend.send(add(1, max_tokens=50))
    two.wait_until(lambda: core.scheduler.num_running == 2)
    os.kill(before[0], signal.SIGSTOP)  # what is in flight stays there
    os.waitid(os.P_PID, before[0], os.WSTOPPED)
    two.wait_until(lambda: len(core._in_flight) == 2 and not core._is_done(core._in_flight[0]))
    waiting = two.frontend()
    for request_id in range(MAX_NUM_SEQS):
        waiting.send(add(request_id, 5, max_tokens=4))
    two.wait_until(lambda: len(core.scheduler.waiting) == MAX_NUM_SEQS)
    os.kill(before[rank], signal.SIGKILL)
    two.wait_until(lambda: two.workers.generation == 2)
    assert not set(two.pids) & set(before)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for frontend, count in ((running[0], 1), (running[1], 1), (waiting, MAX_NUM_SEQS)):  # with the new ones
        ended = 0
        while ended < count:
            ended += len(two.answer(frontend, StepOutputs).finished)
    assert two.run_request(9, 6, 8) == alone(6, 8)
    two.wait_until(lambda: len(two.plans_of(1, generation=2)) == len(two.plans_of(0, generation=2)))
    assert two.plans_of(1, generation=2) == two.plans_of(0, generation=2) != []
    assert core.supervisor.num_restarts == 1 and core.scheduler.is_idle


@pytest.mark.parametrize(("number", "is_told"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGSEGV, False)])
def test_a_signal_from_outside_is_told_from_a_death_of_their_own(two, number, is_told):
    os.kill(two.pids[1], number)
    os.waitid(os.P_PID, two.pids[1], os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    assert two.workers.kill() is is_told


def test_a_rank_that_is_stopped_while_there_is_nothing_to_do_is_found(two, caplog):
    """Else all would seem well until somebody asks."""
    two.workers._silent._timeout_s = 0.3
    assert two.run_request(1, 5, 3) == alone(5, 3)
    before = two.pids
    os.kill(before[1], signal.SIGSTOP)
    two.wait_until(lambda: two.workers.generation == 2)
    assert "worker 1 was stopped by a signal" in caplog.text and "and there is nothing to do" in caplog.text
    assert not set(two.pids) & set(before) and two.run_request(2, 6, 8) == alone(6, 8)


# ------------------------------------------------------------------------------------------------------------ control
def test_stacks_are_asked_of_serving_workers_and_logged(two, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level(logging.INFO, "quire"):
        two.core.ask_for_stacks()
        two.wait_until(lambda: "rank 0 is well" in caplog.text and "rank 1 is well" in caplog.text)
    assert "stacks of the core" in caplog.text and "test_workers.py" in caplog.text
    assert two.run_request(1, 5, 3) == alone(5, 3)  # between steps, and no harm done


def test_a_request_is_answered_for_a_worker_that_ended_before(two):
    replies: list[ControlReply] = []
    os.kill(two.pids[1], signal.SIGSTOP)
    os.waitid(os.P_PID, two.pids[1], os.WSTOPPED)
    two.workers.send_control(DumpStacks, replies.append)
    two.wait_until(lambda: [r.rank for r in replies] == [0])
    os.kill(two.pids[1], signal.SIGKILL)
    two.wait_until(lambda: len(replies) == 2)
    assert [(r.rank, bool(r.error)) for r in replies] == [(0, False), (1, True)]
    with pytest.raises(WorkersFailed, match="do not serve"):
        two.workers.send_control(DumpStacks, replies.append)
    two.wait_until(lambda: two.workers.is_ready)
    two.workers.send_control(DumpStacks, replies.append)
    two.wait_until(lambda: len(replies) == 4)
    assert replies[-1].error == "" and replies[-1].id != replies[0].id


def test_an_answer_that_nobody_asked_for_is_the_workers_failure():
    with pytest.raises(WorkersFailed, match="was not asked"):
        WorkerGroup(worker_template(1))._handle(ControlReply(0, 1, "", b""), [])


def test_results_must_be_written_by_this_generation():
    workers = WorkerGroup(worker_template(1))
    workers.generation, workers.result_ring, workers._ready = 2, ResultRing.create(4), set()
    workers.result_ring.generation = 1
    with pytest.raises(WorkersFailed, match="ring of results"):
        workers._handle(WorkerReady(0), [])
    assert not workers.is_ready
    workers.result_ring.close()


# -------------------------------------------------------------------------------------------- the plan's world size
class NoSteps:
    """A runner that must not be asked for a step."""

    def step(self, words: np.ndarray, read_masks: object) -> None:
        raise AssertionError("a plan for another group was run")


def test_a_worker_refuses_a_plan_for_another_world_size():
    ring, core_link = PlanRing.create(1 << 10, 1), CoreToWorkers(7)
    config = worker_template(2)
    fds = [os.dup(fd) for fd in ring.fds(0)]
    worker = Worker(msgspec.structs.replace(config, generation=7, control_address=core_link.address, plan_ring_fds=fds))
    words = np.zeros(HEADER.width, np.int32)
    words[[HEADER.at["step"], HEADER.at["world_size"]]] = 1, 4
    ring.write(KIND_PLAN, words, 1.0)
    worker._serve(NoSteps())
    assert core_link.sockets()[0].poll(10_000)
    ((rank, said),) = core_link.receive()
    assert rank == 0 and isinstance(said, WorkerFailed)
    assert "is one of 2" in said.message and "world size of 4" in said.message
    worker.reader.close()
    ring.close()
    core_link.close()


def test_the_core_takes_that_refusal_for_the_workers_failure():
    workers = WorkerGroup(worker_template(2))
    with pytest.raises(WorkersFailed, match="world size of 4"):
        workers._handle(WorkerFailed(0, "worker 0 is one of 2 and was sent a plan for a world size of 4"), [])
