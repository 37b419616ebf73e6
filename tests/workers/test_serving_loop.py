"""The worker's loop around its plans, with a ring and a runner that only record."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from quire.ipc.step.plan_ring import KIND_PLAN, KIND_SHUTDOWN
from quire.ipc.step.sections import HEADER
from quire.workers import worker
from quire.workers.group.place import ExchangeFailed
from quire.workers.worker import CAPTURE_PAUSE_S, GPU_SPIN_S, IDLE_S, READ_TIMEOUT_S, SHORT_SPIN_S, Worker


class Loop:
    """A worker's that reads `records`: P a plan, - nothing in time; then it is told to end."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        records: str,
        cores: int = 16,
        num_captures: int = 0,
        waits_s: float | None = None,
        pipeline: object = None,
        engines: int = 1,
    ) -> None:
        self.spun, self.waited, self.steps, self.captured = [], [], 0, 0
        self._records, self._num_captures = iter(records), num_captures
        self._plan = np.zeros(HEADER.width, np.int32)
        self._plan[HEADER.at["world_size"]] = 1
        monkeypatch.setattr(worker, "cpu_share", lambda: cores)
        monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
        loop = object.__new__(Worker)
        loop.engine = SimpleNamespace(device="cuda", world_size=1, collective_timeout_s=10.0, data_parallel_size=engines)
        loop.config, loop.link, loop.ring = SimpleNamespace(rank=0), None, None
        if waits_s is not None:
            loop.group = SimpleNamespace()
        loop.profiler = SimpleNamespace(is_active=False)
        loop.reader = SimpleNamespace(read=self._read)
        self.signals = 0
        device = SimpleNamespace(signal=self._signal, waited_s=lambda: waits_s)
        captures = {"capture_ahead": self._capture, "capture_masked_sampling_graph": lambda: None}
        model = SimpleNamespace(items=None)
        runner = SimpleNamespace(step=self._step, device=device, model=model, pipeline=pipeline, **captures)
        loop._serve(runner)

    def _read(self, timeout_s, spin_s):
        self.waited.append(timeout_s)
        self.spun.append(spin_s)
        record = next(self._records, "end")
        return None if record == "-" else (KIND_PLAN if record == "P" else KIND_SHUTDOWN, self._plan)

    def _signal(self):
        self.signals += 1

    def _step(self, words, mask):
        self.steps += 1
        return []

    def _capture(self):
        """As ModelRunner.capture_ahead: False with the last."""
        self.captured += 1
        return self.captured < self._num_captures


@pytest.mark.parametrize(
    ("cores", "engines", "spin_s"), [(16, 1, GPU_SPIN_S), (2, 1, SHORT_SPIN_S), (16, 8, SHORT_SPIN_S), (17, 8, GPU_SPIN_S)]
)
def test_only_a_worker_that_had_a_plan_spins_for_the_next_where_all_engines_have_cores(monkeypatch, cores, engines, spin_s):
    loop = Loop(monkeypatch, "-PP--P", cores, engines=engines)
    assert loop.spun == [0.0, 0.0, spin_s, spin_s, 0.0, 0.0, spin_s] and loop.steps == 3


def test_steps_are_captured_ahead_after_a_while_without_a_plan_then_one_by_one(monkeypatch):
    loop = Loop(monkeypatch, "P--P-----", num_captures=4)
    idle, pause, ever = IDLE_S, CAPTURE_PAUSE_S, READ_TIMEOUT_S
    assert loop.waited == [idle, idle, pause, pause, idle, pause, ever, ever, ever, ever] and loop.captured == 4


def test_a_step_that_waits_for_other_ranks_for_too_long_is_told(monkeypatch):
    Loop(monkeypatch, "P--", waits_s=9.0)
    with pytest.raises(ExchangeFailed, match="a step has not come to its end on the GPU for 10 s"):
        Loop(monkeypatch, "P-", waits_s=10.5)


def test_tokens_that_are_due_are_asked_for_while_there_is_nothing_to_do(monkeypatch):
    """So that the device waits for them, which is seen, though no plan needs them."""
    due = iter([True, False, True])
    loop = Loop(monkeypatch, "P--P-", pipeline=SimpleNamespace(rest=lambda: next(due)))
    assert loop.steps == 2 and loop.signals == 2 + 2
