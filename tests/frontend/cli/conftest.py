"""Commands that run in the test's own process set up logging for all of it: that is taken back."""

import logging
from collections.abc import Iterator

import msgspec
import pytest

from quire.frontend.cli import estimate_sizes
from quire.ipc.memory_plan import RankSizes
from quire.workers.sizes import answer


@pytest.fixture(autouse=True)
def logging_is_as_before() -> Iterator[None]:
    logger = logging.getLogger("quire")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def asked_here(monkeypatch):
    """A worker's code counts weights and sizes in this process."""
    decode = msgspec.json.Decoder(RankSizes | int | str).decode
    monkeypatch.setattr(estimate_sizes, "_answer", lambda asked: decode(answer(asked)))
