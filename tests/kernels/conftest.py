"""What tests of kernels ask of the GPU."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import quicken

    quicken()


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(autouse=True)
def gives_memory_back(request):
    """Test processes share the GPU: what one's allocator keeps the others lack."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
