"""Shared by the tests of whole servers: one thread for each worker, and nothing may be left behind."""

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread_each() -> Iterator[None]:
    """Several engines at once on few cores: OpenMP threads that spin while they wait for one another would cost all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert psutil.Process().children() == []
