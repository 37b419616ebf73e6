"""Triton's key is computed once, by whoever wants it first; others wait for it."""

import sys
import threading
from types import SimpleNamespace

import pytest
from deadlines import DEADLINE_S

from quire.kernels.triton_support.triton_key import read_triton, read_triton_in_background


def test_who_comes_second_waits_and_computes_nothing(monkeypatch):
    begun, go_on, order = threading.Event(), threading.Event(), []

    def triton_key():
        if not order:
            order.append("computed")
            begun.set()
            assert go_on.wait(DEADLINE_S)
            order.append("known")

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=triton_key))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    first = read_triton_in_background()
    assert begun.wait(DEADLINE_S)
    second = threading.Thread(target=lambda: order.append(read_triton()))
    second.start()
    second.join(0.2)
    assert second.is_alive() and order == ["computed"]
    go_on.set()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    assert order == ["computed", "known", None]


def test_it_is_tritons_own_and_kept():
    cache = pytest.importorskip("triton.runtime.cache")
    read_triton()
    assert cache.triton_key.cache_info().currsize == 1


def test_without_triton_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    read_triton()
