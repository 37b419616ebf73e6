"""Shared by the tests of ipc/: children's reports, and a check that each test leaves nothing behind."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ipc_cores
import psutil
import pytest
import uvloop
from frontend_to_core_cases import echo
from ipc_cores import CoreThread, Reports

from quire.ipc.links import paths


@pytest.fixture(scope="session", autouse=True)
def uvloop_has_run() -> None:
    """Its first loop opens descriptors that stay for the process's life."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Descriptors, children, threads and private folders after a test are those from before it, or fewer descriptors: garbage
    of earlier tests of the process may go meanwhile."""
    before, children, threads = set(os.listdir("/proc/self/fd")), psutil.Process().children(), set(threading.enumerate())
    yield
    if set(os.listdir("/proc/self/fd")) - before:
        gc.collect()  # a map of shared memory holds a descriptor of its own
    assert psutil.Process().children() == children
    assert [t for t in threading.enumerate() if t.name.startswith("test-") and t not in threads] == []
    assert set(os.listdir("/proc/self/fd")) - before == set()
    assert paths._held == {}


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    monkeypatch.setenv("PYTHONPATH", str(Path(ipc_cores.__file__).parent), prepend=os.pathsep)  # where ipc_children is
    pipe = Reports()
    yield pipe
    pipe.close()


@pytest.fixture(params=[pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])
def run(request):
    """Runs a coroutine on a loop of either kind; frontends have uvloop's."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run


@pytest.fixture
def make_core():
    """Cores that run in threads; the options are CoreThread's."""
    cores: list[CoreThread] = []

    def make(answer: Callable | None = None, **options) -> CoreThread:
        cores.append(CoreThread(answer or echo, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.stop()
