"""Cores for tests of the loop: one whose links and workers the test plays, and one with a real model behind it."""

from collections.abc import Iterator

import pytest
from core_by_hand import CoreByHand
from core_with_model import CoreWithModel


@pytest.fixture
def by_hand() -> Iterator[CoreByHand]:
    by_hand = CoreByHand()
    yield by_hand
    by_hand.close()


@pytest.fixture
def without_replay() -> Iterator[CoreByHand]:
    """A core that ends requests with the workers that ran them."""
    by_hand = CoreByHand(replay=False)
    yield by_hand
    by_hand.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[CoreWithModel]:
    made = CoreWithModel()
    yield made
    made.close()
