"""How many threads a CPU worker takes, by the size of its model and by what the user asked for."""

import os

import pytest
import torch

from quire.ipc.process import cpus
from quire.workers.devices import threads

BILLION = 10**9


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)


@pytest.mark.parametrize("asked", ["", "8"])
def test_a_small_model_has_one_thread(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads.choose_num_threads(16 << 20) == 1


def test_a_large_one_has_as_many_as_the_user_asked_for(monkeypatch: pytest.MonkeyPatch, unasked: None) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # which reads the variable when torch starts
    assert threads.choose_num_threads(2 * BILLION) == 3


def test_else_one_for_each_core_it_may_use(monkeypatch: pytest.MonkeyPatch, unasked: None, tmp_path) -> None:
    for cpu, core in enumerate(("0", "1", "0", "1")):  # two cores of two hyper-threads
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(core + "\n")
        (topology / "physical_package_id").write_text("0\n")
    monkeypatch.setattr(threads, "CPUS", tmp_path)
    monkeypatch.setattr(cpus, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert threads.choose_num_threads(2 * BILLION) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    assert threads.choose_num_threads(2 * BILLION) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 8, 9})  # of which nothing is known
    assert threads.choose_num_threads(2 * BILLION) == 3
    for quota, share in (("max 100000", 3), ("150000 100000", 2), ("10000 100000", 1)):
        (tmp_path / "cpu.max").write_text(quota + "\n")
        assert threads.choose_num_threads(2 * BILLION) == cpus.cpu_share() == share
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    assert cpus.cpu_share() == 3  # no more than it may run on
