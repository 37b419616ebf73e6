"""Kernels in Gluon, which changes its names from version to version, compile for sm_90 with the installed Triton."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

# A driver that says it is a Hopper, tensors without memory, and launches that only compile.
PROGRAM = """
import types, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper(DriverBase):
    def __init__(self): pass
    @classmethod
    def is_active(cls): return True
    def map_python_to_cpp_type(self, ty): return "int"
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_active_torch_device(self): return torch.device("meta")
    def get_benchmarker(self): raise NotImplementedError
    def get_device_interface(self): return torch.cuda

driver.set_active(Hopper())
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)
run, compiled = JITFunction.run, []
JITFunction.run = lambda self, *args, warmup, **kwargs: compiled.append(run(self, *args, warmup=True, **kwargs))

def meta(*shape, dtype=torch.bfloat16): return torch.empty(shape, dtype=dtype, device="meta")
def ints(*shape): return meta(*shape, dtype=torch.int32)

{body}
for kernel in compiled:
    print(kernel.metadata.shared <= 232448, "wgmma" in kernel.asm["ptx"], "cp.async.bulk.tensor" in kernel.asm["ptx"])
"""

PREFILL = """
from quire.kernels import attention_prefill_hopper, attention_prefill_schedule
workspace = attention_prefill_schedule.PrefillWorkspace.allocate(8, 1024, 32, 8, 128, "meta", torch.bfloat16)
q = meta(1024, 48 * 128)[:, : 32 * 128].unflatten(1, (32, 128))
cache = meta(100, 8, 64, 128)
attention_prefill_hopper.launch(
    q, cache, cache, ints(9, 64), ints(8), ints(9), ints(8), meta(1024, 32, 128), scale=0.1, workspace=workspace
)
"""

LINEAR = """
from quire.kernels import linear_hopper as kernel
for rows, gated, parts in ((16, False, False), (64, True, False), (32, False, True)):
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, in_parts=parts)
    out = meta(config.parts, rows, 4096, dtype=torch.float32) if parts else meta(rows, 4096)
    kernel.launch(meta(rows, 4096), meta(8192 if gated else 4096, 4096), None, out, config, is_gated=gated, pdl=1)
"""


@pytest.mark.parametrize("body,count", [(PREFILL, 1), (LINEAR, 3)], ids=["prefill", "linear"])
def test_kernels_for_hopper_compile(body, count, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = PROGRAM.replace("{body}", body)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.split() == ["True"] * 3 * count
