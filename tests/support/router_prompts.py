"""Prompts for tests of the router, in blocks of SIZE tokens."""

import numpy as np

SIZE = 4  # tokens of a block


def array(ids) -> np.ndarray:
    return np.array(ids, np.int32)


def blocks(count: int, seed: int = 0) -> np.ndarray:
    """A prompt of so many blocks."""
    return np.random.default_rng(seed).integers(0, 1000, count * SIZE).astype(np.int32)
