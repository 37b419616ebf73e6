"""What tests of kernels ask of the GPU."""

import os
import zlib
from collections import Counter

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import quicken

    quicken()


MANY = 12  # cases of one test in the interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Half the cases of an interpreted test with many are slow, drawn by their names: the same in every run."""
    own = [item for item in items if item.get_closest_marker("interpret") and not item.get_closest_marker("slow")]
    cases = Counter(item.nodeid.partition("[")[0] for item in own)
    for item in own:
        if cases[item.nodeid.partition("[")[0]] > MANY and zlib.crc32(item.nodeid.encode()) % 2:
            item.add_marker(pytest.mark.slow)


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
