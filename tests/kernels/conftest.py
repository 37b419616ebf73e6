"""What tests of kernels ask of the GPU."""

import pytest
import torch


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
