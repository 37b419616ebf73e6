"""Commands that run in the test's own process set up logging for all of it: that is taken back."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_is_as_before() -> Iterator[None]:
    logger = logging.getLogger("quire")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
