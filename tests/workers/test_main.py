"""A worker process's first steps, in order, with nothing real behind them."""

import faulthandler
import os
import threading
from types import SimpleNamespace

import pytest

from quire.workers import __main__ as worker_main


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """What `main` does, with variables and functions as they were before put back afterwards."""
    found: list[str] = []

    def thread(target, **_):
        return SimpleNamespace(start=lambda: found.append(target.__name__))

    def load():
        return lambda config: SimpleNamespace(run=lambda: found.append(f"run on {config.engine.device}"))

    for name in (*worker_main.ENVIRONMENT, "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setattr(threading, "Thread", thread)
    monkeypatch.setattr(worker_main, "load", load)
    for name in ("make_context_in_background", "read_triton_in_background", "set_up_logging"):
        monkeypatch.setattr(worker_main, name, lambda *args, name=name: found.append(name))
    monkeypatch.setattr(faulthandler, "register", lambda _: None)
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_is_loaded_with_its_variables_while_the_configuration_is_waited_for(steps, monkeypatch, device):
    def config(_):
        assert all(os.environ[name] == value for name, value in worker_main.ENVIRONMENT.items())
        steps.append("config")
        return SimpleNamespace(engine=SimpleNamespace(device=device, log_level="info", log_format="text"), gpu_index=0)

    monkeypatch.setattr(worker_main, "child_main_config", config)
    worker_main.main()
    aside = ["make_context_in_background", "read_triton_in_background"] if device == "cuda" else []
    assert steps == ["load_in_background", "config", *aside, "set_up_logging", f"run on {device}"]
    assert os.environ["GOMP_SPINCOUNT"] == worker_main.SPIN_COUNT


def test_variables_that_are_set_are_left_alone(steps, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    config = SimpleNamespace(engine=SimpleNamespace(device="cpu", log_level="info", log_format="text"))
    monkeypatch.setattr(worker_main, "child_main_config", lambda _: config)
    worker_main.main()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0" and "GOMP_SPINCOUNT" not in os.environ


def test_what_cannot_be_loaded_is_left_to_the_main_thread(monkeypatch):
    def load():
        raise ImportError("no torch")

    monkeypatch.setattr(worker_main, "load", load)
    worker_main.load_in_background()
