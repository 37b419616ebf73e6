"""The GPU device, as far as it can be tested without one."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

FAILING_STEP = """
import queue, types
from quire.workers.devices.cuda import CudaDevice

class Failed:
    def synchronize(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

events = queue.SimpleQueue()
events.put(Failed())
CudaDevice._complete(types.SimpleNamespace(_events=events, _ring=None))
"""


def test_a_step_that_fails_on_the_device_ends_the_process():
    child = subprocess.run([sys.executable, "-c", FAILING_STEP], capture_output=True, text=True, timeout=120)
    assert child.returncode == 1
    assert "a step failed on the GPU" in child.stderr and "illegal memory access" in child.stderr
