"""What tests of weights on a CPU share."""

import pytest

from quire.workers.layers.formats import chosen_cpu


@pytest.fixture
def dequantized(monkeypatch):
    """Quantized layers are dequantized, as they are where no format of a CPU holds them, in whatever type activations have."""
    monkeypatch.setattr(chosen_cpu, "DTYPES", ())
