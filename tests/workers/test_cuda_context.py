"""A device's context is asked of the driver beside everything else; what goes wrong there stops nothing."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
from deadlines import DEADLINE_S

from quire.workers.devices.cuda_context import make_context_in_background


def wait_for(thread: threading.Thread) -> None:
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("init", "get", "calls"),
    [(0, 0, ["init", "get", "retain"]), (100, 0, ["init"]), (0, 101, ["init", "get"])],
)
def test_each_call_follows_the_success_of_the_one_before(init, get, calls, monkeypatch):
    seen = []
    driver = SimpleNamespace(
        cuInit=lambda flags: seen.append("init") or init,
        cuDeviceGet=lambda device, index: seen.append("get") or (get if index == 3 else 999),
        cuDevicePrimaryCtxRetain=lambda context, device: seen.append("retain") or 2,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    wait_for(make_context_in_background(3))
    assert seen == calls


def test_without_a_driver_nothing_happens(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    wait_for(make_context_in_background(3))
    assert raised == []
