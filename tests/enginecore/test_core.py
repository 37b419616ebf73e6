"""The core's loop, turned by hand: what becomes of a lost frontend's requests, and that idleness is idle."""

import contextlib
import dataclasses
import errno
import logging
import signal
import time
import types

import numpy as np
import pytest
from core_by_hand import EPOCH, VOCAB_SIZE, add

from quire.enginecore import core as core_module
from quire.enginecore import daemon, stop_signals
from quire.enginecore.core import AWAKE_S, LATE_S
from quire.enginecore.encoded_steps import EncodedSteps
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.stats import Expected
from quire.enginecore.worker_profiles import WorkersFailed
from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.frontend import Abort, Heartbeat, PromptLogprobs, RequestError, StepOutputs
from quire.ipc.messages.workers import ItemFailed, ItemsEncoded, PromptLogprobsOfRow, SideResults


def test_a_request_that_comes_with_its_frontends_loss_is_not_run(by_hand):
    frontend, other = by_hand.frontend(), by_hand.frontend()
    other.send(add(1, max_tokens=50))
    by_hand.until(lambda: by_hand.core.scheduler.num_running == 1)
    for message in (add(1, max_tokens=50), b"no message", add(2, max_tokens=50)):  # at best in one turn
        frontend.send(message)
    by_hand.until(lambda: frontend.identity not in by_hand.link.frontends)
    owner = by_hand.core.owners.number(other.identity)
    assert len(by_hand.core.owners) == 1 and owner in by_hand.core.owners
    assert {o for o, _ in by_hand.core.scheduler._sequences} == {owner}
    tokens = 0
    while tokens < 50:
        tokens += len(by_hand.answer(other, StepOutputs).tokens) // 4
    assert by_hand.core.scheduler.is_idle


def test_a_ring_that_comes_after_the_result_was_seen_does_not_keep_an_idle_core_awake(by_hand):
    ring = by_hand.workers.result_ring
    assert ring.arm(1, 1)
    ring.ring_doorbell()
    ring.disarm()
    by_hand.core._heartbeat()
    by_hand.core._wait()
    by_hand.core._next_heartbeat = time.monotonic() + 0.15
    by_hand.core._wait()
    assert time.monotonic() > by_hand.core._next_heartbeat - 0.05


def test_a_core_that_spins_is_awake_for_a_while_after_a_result_and_then_sleeps(by_hand):
    core = by_hand.core
    core.config = dataclasses.replace(core.config, spins=True)
    core._heartbeat()
    core._next_heartbeat = time.monotonic() + 60.0
    core._last_result = began = time.monotonic()
    core._wait()
    assert time.monotonic() - began < 30.0  # not to the next heartbeat
    core._last_result -= AWAKE_S
    began = time.monotonic()
    core._next_heartbeat = began + 0.15
    core._wait()
    assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("late_s,sleeps", [(-0.001, False), (LATE_S / 2, False), (LATE_S * 2, True)])
def test_a_core_that_spins_sleeps_only_for_a_step_that_is_very_late(by_hand, monkeypatch, late_s, sleeps):
    frontend, core = by_hand.frontend(), by_hand.core
    core.config = dataclasses.replace(core.config, spins=True)
    frontend.send(add(1, max_tokens=9))
    monkeypatch.setattr(by_hand.workers, "answer", lambda: None)  # the step is under way
    by_hand.until(lambda: core._in_flight)
    core._last_result = 0.0
    monkeypatch.setattr(core._expected, "seconds", lambda step: 1.0)
    core._in_flight[0].sent_at = 99.0 - late_s
    core._next_heartbeat = 100.2
    timeouts = []
    monkeypatch.setattr(core, "_poll", timeouts.append)
    with monkeypatch.context() as still:
        still.setattr(core_module, "time", types.SimpleNamespace(monotonic=lambda: 100.0))
        core._wait()
    assert len(timeouts) == 1 and (timeouts[0] > 0.1) is sleeps


def test_steps_with_prompts_are_expected_by_their_tokens_and_leave_the_others_expectation_alone():
    def step(num_tokens, prefills=()):
        return types.SimpleNamespace(num_tokens=num_tokens, prefills=list(prefills))

    expected = Expected()
    for _ in range(50):
        expected.learn(step(8), 0.004)
        expected.learn(step(8192, ["one"]), 0.2)
    assert expected.seconds(step(64)) == pytest.approx(0.004, rel=1e-3)
    assert expected.seconds(step(256, ["one"])) == pytest.approx(0.2 / 32, rel=1e-3)


@pytest.mark.parametrize("few", [True, False])
def test_few_rows_are_published_before_the_next_step_is_planned(by_hand, monkeypatch, few):
    monkeypatch.setattr(core_module, "PUBLISH_FIRST_ROWS", 4 if few else 0)
    frontend, core = by_hand.frontend(), by_hand.core
    frontend.send(add(1, max_tokens=40))
    by_hand.until(lambda: len(core._in_flight) == core_module.STEPS_OF_STAGE)
    order = []
    for name in ("_publish", "_fill"):
        call = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *args, name=name, call=call: (order.append(name), call(*args)))
    by_hand.workers.answer()
    assert core._collect()
    assert order == (["_publish", "_fill"] if few else ["_fill", "_publish"])


def test_a_heartbeat_says_what_every_step_was_like(by_hand):
    frontend, core = by_hand.frontend(), by_hand.core
    frontend.send(add(1, num_tokens=4, max_tokens=3))
    by_hand.until(lambda: core.scheduler.counters.generation_tokens == 3 and not core._in_flight)
    core.stats.masks(0.002)
    core._next_heartbeat = 0.0
    stats = None
    while stats is None or not sum(stats.mask_time.counts):
        stats = by_hand.answer(frontend, Heartbeat).stats
    num_steps = sum(stats.iteration_tokens.counts)
    assert num_steps >= 3 and stats.iteration_tokens.sum == 4 + num_steps - 1
    for distribution in (stats.step_time, stats.host_time, stats.batch_fill):
        assert sum(distribution.counts) == num_steps and distribution.sum > 0
    assert stats.mask_time.sum == 0.002
    assert sum(stats.inter_token.counts) == 3 - 1 and stats.inter_token.sum > 0
    assert [process.name for process in stats.processes] == ["engine"] and stats.num_deferred == 0


def test_the_core_sleeps_while_prompt_logprobs_are_on_their_way(by_hand):
    frontend, core = by_hand.frontend(), by_hand.core
    frontend.send(add(1, max_tokens=1, prompt_logprobs=0))
    by_hand.until(lambda: core._in_flight)  # its tokens are there
    core._next_heartbeat = time.monotonic() + 0.2
    core._wait()
    assert time.monotonic() >= core._next_heartbeat - 0.01
    worker = WorkerToCore(by_hand.workers._link.address, 0, by_hand.workers.generation)
    row = PromptLogprobsOfRow(0, bytes(12), bytes(12), b"", b"")
    worker.send(SideResults(0, core._in_flight[0].scheduled.step, [row]))
    assert by_hand.answer(frontend, PromptLogprobs).start == 1
    assert by_hand.answer(frontend, StepOutputs).finished[0].reason == "length"
    worker.close()


def test_all_that_comes_beside_a_steps_tokens_is_one_message(by_hand):
    core, frontends = by_hand.core, [by_hand.frontend(), by_hand.frontend()]
    for n, frontend in enumerate(frontends):
        frontend.send(add(10 + n, 3, max_tokens=1, prompt_logprobs=0))  # of less than a block: both are in one step
    frontends[0].send(add(7, 3, max_tokens=1))  # and one that has nothing beside
    while len(core.scheduler.waiting) < 3:
        core._take_messages()
    by_hand.until(lambda: core._in_flight)
    step = core._in_flight[0].scheduled
    rows = sorted(step.side_rows)
    assert len(rows) == 2 and len(step.slots) == 3
    for _ in range(5):
        by_hand.turn()
    assert core._in_flight  # the tokens are there
    worker = WorkerToCore(by_hand.workers._link.address, 0, by_hand.workers.generation)
    columns = {row: np.full(2, row, np.int32).tobytes() for row in rows}
    worker.send(SideResults(0, step.step, [PromptLogprobsOfRow(row, c, c, b"", b"") for row, c in columns.items()]))
    for n, frontend in enumerate(frontends):
        got = by_hand.answer(frontend, PromptLogprobs)
        row = next(r for r, target in step.side_rows.items() if target.request_id == 10 + n)
        assert (got.id, got.start, got.num_top, got.ranks) == (10 + n, 1, 0, columns[row])
    assert not core._in_flight and not core._side_results
    worker.close()


def test_a_step_with_runs_of_the_encoder_is_taken_when_all_their_failures_are_known(by_hand):
    """The result of a request's only step is there before the message on the failure, which must end the request."""
    core, frontend, failed, steps = by_hand.core, by_hand.frontend(), [], []
    schedule = core.scheduler.schedule

    def with_runs(now):
        if (made := schedule(now)) is None:
            return None
        steps.append(dataclasses.replace(made[1], has_runs=True))
        return made[0], steps[-1]

    def fail(message):
        failed.append(message)
        core.scheduler.abort(core.owners.number(frontend.identity), 1)

    core.scheduler.schedule, by_hand.workers.on_item_failed = with_runs, fail
    frontend.send(add(1, max_tokens=1))
    by_hand.until(lambda: steps)
    for _ in range(5):
        by_hand.turn()
    assert by_hand.workers.result_ring.ready(*steps[0].size) and not core.scheduler.is_idle
    worker = WorkerToCore(by_hand.workers._link.address, 0, by_hand.workers.generation)
    worker.send(ItemFailed(0, 3, "memory"))
    worker.send(ItemsEncoded(0, steps[0].step))
    by_hand.until(lambda: core.scheduler.is_idle)
    assert failed == [ItemFailed(0, 3, "memory")]
    frontend.send(add(2, max_tokens=1))
    by_hand.until(lambda: len(steps) == 2)
    worker.send(ItemsEncoded(0, steps[1].step))
    answer = by_hand.answer(frontend, StepOutputs)  # the first: nothing came of request 1
    assert np.frombuffer(answer.keys, np.int64).tolist() == [2 << 8] and len(failed) == 1
    worker.close()


def test_all_ranks_with_an_encoder_must_have_told():
    steps = EncodedSteps(num_ranks=2, depth=2)
    step = ScheduledStep(7, np.zeros(1, np.int32), np.ones(1, bool), [], num_tokens=1, has_runs=True)
    assert not steps.has_all(step)
    for rank, number in ((1, 7), (0, 6)):
        steps.heard(ItemsEncoded(rank, number))
        assert not steps.has_all(step)
    for number in (7, 8):  # a rank may be ahead
        steps.heard(ItemsEncoded(0, number))
        assert steps.has_all(step)
    steps.clear()
    assert not steps.has_all(step)


def test_side_results_of_an_aborted_request_do_not_go_to_its_ids_next_one(by_hand):
    core, frontend = by_hand.core, by_hand.frontend()
    frontend.send(add(1, max_tokens=1, prompt_logprobs=0))
    by_hand.until(lambda: core._in_flight)
    step = core._in_flight[0].scheduled
    frontend.send(Abort(EPOCH, [1]))
    frontend.send(add(1, max_tokens=1))
    by_hand.until(lambda: len(core._in_flight) == 2)
    row = PromptLogprobsOfRow(*step.side_rows, bytes(12), bytes(12), b"", b"")
    core._side_results[step.step] = SideResults(0, step.step, [row])
    assert isinstance(by_hand.answer(frontend, StepOutputs | PromptLogprobs), StepOutputs)


def test_side_results_of_other_rows_are_the_workers_failure(by_hand):
    core, frontend = by_hand.core, by_hand.frontend()
    frontend.send(add(1, max_tokens=1, prompt_logprobs=0))
    by_hand.until(lambda: core._in_flight)
    core._side_results[core._in_flight[0].scheduled.step] = SideResults(0, 1, [PromptLogprobsOfRow(3, b"", b"", b"", b"")])
    with pytest.raises(WorkersFailed, match="side results"):
        by_hand.until(lambda: not core._in_flight)


@pytest.mark.parametrize("token", [-1, -(2**31), VOCAB_SIZE, 2**31 - 1])
def test_a_result_that_is_no_token_is_the_workers_failure(by_hand, token):
    frontend, core = by_hand.frontend(), by_hand.core
    frontend.send(add(1, max_tokens=5))
    while not core._in_flight:
        core._take_messages()
        core._fill()
    by_hand.workers.result_ring.write(core._in_flight[0].scheduled.step, np.asarray([token], np.int32))
    with pytest.raises(WorkersFailed, match="outside the vocabulary") as failed:
        core._collect()
    core._replace_workers(str(failed.value))
    frontend.send(add(2, max_tokens=5))
    ended = set()
    while len(ended) < 2:
        ended |= {end.key >> 8 for end in by_hand.answer(frontend, StepOutputs).finished}


def test_an_id_in_use_is_refused_and_its_owner_goes_on(by_hand):
    frontend = by_hand.frontend()
    frontend.send(add(1, max_tokens=30))
    frontend.send(add(1, max_tokens=30))
    assert by_hand.answer(frontend, RequestError).message == "request id 1 is in use"
    by_hand.until(lambda: by_hand.core.scheduler.is_idle)
    assert by_hand.core.scheduler.counters.generation_tokens == 30


class SlowWorkers:
    """Workers that start in two stages, each done when its line is in the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog
        self.profile = None
        self.start_stage = "load the model"
        self.is_ready = False

    def pollables(self) -> list[int]:
        return []

    def messages(self) -> None:
        if "load the model" in self.caplog.text:
            self.profile, self.start_stage = "a profile", "make their KV cache"
        self.is_ready = "KV cache" in self.caplog.text

    def check_alive(self) -> None:
        pass


def test_a_stop_ends_the_wait_of_an_idle_core(by_hand):
    """A poll goes on after a signal's handler has returned, until its time is over."""
    core, begin = by_hand.core, time.monotonic()
    before = signal.signal(signal.SIGALRM, lambda *_: core.stop(0.0))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        core._poll(60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert core.stopping and time.monotonic() - begin < 30.0
    core._poll(0.0)
    begin = time.monotonic()
    core._poll(0.05)  # once woken, it waits again
    assert time.monotonic() - begin >= 0.04
    core.close()
    core.stop(0.0)  # of a signal that comes last


class Dropped:
    """Is stopped in its finalizer, where what is raised goes nowhere."""

    def __init__(self, stop: stop_signals.EarlyStop) -> None:
        self._stop = stop

    def __del__(self) -> None:
        with contextlib.suppress(stop_signals.Stopped):
            self._stop(signal.SIGTERM, None)


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_machine_that_has_no_descriptors_ends_a_start_in_a_line(monkeypatch, is_ready):
    def run(config, on_ready, *_):
        if is_ready:
            on_ready("ipc:///x")
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(daemon, "_run", run)
    monkeypatch.setattr(daemon, "on_stop_signals", lambda handler: None)
    ended = []
    child = types.SimpleNamespace(terminate=ended.append)
    with pytest.raises(OSError if is_ready else daemon.StartupError, match="Too many open files"):
        daemon.run_engine(None, lambda address: None, child)
    assert ended == [0.0]


def test_a_stop_that_was_dropped_while_the_workers_start_is_not_lost(by_hand, caplog, monkeypatch):
    monkeypatch.setattr(stop_signals, "on_stop_signals", lambda handler: None)
    monkeypatch.setattr(daemon, "HEARTBEAT_INTERVAL_S", 0.0)
    early = stop_signals.EarlyStop()
    early.check()
    Dropped(early)
    with pytest.raises(stop_signals.Stopped, match="while it was starting"):
        daemon._wait_until_ready(SlowWorkers(caplog), by_hand.link, early)


class KilledWorkers(SlowWorkers):
    """Workers that end while they start."""

    from_outside = True

    def check_alive(self) -> None:
        raise WorkersFailed("worker 0 ended unexpectedly")

    def kill(self) -> bool:
        return self.from_outside


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_start_that_fails_says_whether_a_signal_from_outside_is_the_cause(by_hand, caplog, from_outside):
    workers = KilledWorkers(caplog)
    workers.from_outside = from_outside
    with pytest.raises(daemon.StartupError, match="worker 0 ended") as failed:
        daemon._wait_until_ready(workers, by_hand.link, stop_signals.EarlyStop())
    assert failed.value.from_outside is from_outside


def test_workers_that_take_long_to_start_are_spoken_of(by_hand, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    monkeypatch.setattr(daemon, "HEARTBEAT_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO, "quire"):
        early = stop_signals.EarlyStop()
        assert daemon._wait_until_ready(SlowWorkers(caplog), by_hand.link, early, say_every_s=0.1) == "a profile"
    first, second = dict.fromkeys(message for message in caplog.messages if "still starting" in message)
    assert "load the model" in first and "KV cache" in second
