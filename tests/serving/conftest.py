"""Shared by the tests of whole servers: nothing may be left behind."""

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After a module, which keeps its servers for all of its tests."""
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before
