"""Kernels in Gluon, which changes its names from version to version, compile for sm_90 with the installed Triton."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = """
import torch
import hopper_offline
from hopper_offline import COMPILED, ints, meta

hopper_offline.compile_launches()
{body}
for kernel in COMPILED:
    print(kernel.metadata.shared <= 232448, "wgmma" in kernel.asm["ptx"], "cp.async.bulk.tensor" in kernel.asm["ptx"])
"""

PREFILL = """
from quire.kernels.attention import prefill_hopper as attention_prefill_hopper
from quire.kernels.attention import prefill_schedule as attention_prefill_schedule
workspace = attention_prefill_schedule.PrefillWorkspace.allocate(8, 1024, 32, 8, 128, "meta", torch.bfloat16)
q = meta(1024, 48 * 128)[:, : 32 * 128].unflatten(1, (32, 128))
cache = meta(100, 8, 64, 128)
attention_prefill_hopper.launch(
    q, cache, cache, ints(9, 64), ints(8), ints(9), ints(8), meta(1024, 32, 128), scale=0.1, workspace=workspace
)
"""

LINEAR = """
from quire.kernels.linear import linear_hopper as kernel
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.split() == ["True"] * 3 * count
