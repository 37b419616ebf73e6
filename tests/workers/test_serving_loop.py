"""The worker's loop around its plans, with a ring and a runner that only record."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from quire.ipc.plan import H_WORLD_SIZE, HEADER_WORDS
from quire.ipc.ring import KIND_PLAN, KIND_SHUTDOWN
from quire.workers import worker
from quire.workers.worker import GPU_SPIN_S, SHORT_SPIN_S, Worker


@pytest.mark.parametrize(("cores", "spin_s"), [(16, GPU_SPIN_S), (2, SHORT_SPIN_S)])
def test_only_a_worker_that_had_a_plan_spins_for_the_next(monkeypatch, cores, spin_s):
    plan = np.zeros(HEADER_WORDS, np.int32)
    plan[H_WORLD_SIZE] = 1
    records = iter([None, (KIND_PLAN, plan), (KIND_PLAN, plan), None, None, (KIND_PLAN, plan), (KIND_SHUTDOWN, plan)])
    spun = []

    def read(timeout_s, spin_s):
        spun.append(spin_s)
        return next(records)

    monkeypatch.setattr(worker, "cpu_share", lambda: cores)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    loop = object.__new__(Worker)
    loop.config = SimpleNamespace(device="cuda", world_size=1)
    loop.reader = SimpleNamespace(read=read)
    steps = []
    runner = SimpleNamespace(
        step=lambda words, mask: steps.append(words) or [],
        capture_ahead=lambda: False,
        device=SimpleNamespace(signal=lambda: None),
    )
    loop._serve(runner)
    assert spun == [0.0, 0.0, spin_s, spin_s, 0.0, 0.0, spin_s] and len(steps) == 3
