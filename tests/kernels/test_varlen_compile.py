"""Attention over packed rows and poolers' sums for a Hopper GPU that is simulated: they compile, attention to wgmma."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import hopper_offline
hopper_offline.HOW()
import json, torch
from hopper_offline import COMPILED, KEYS, ints, meta
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.attention.varlen import varlen_attention
from quire.kernels.attention.varlen_reference import Reach
from quire.kernels.pooling.segments import segments

def run(n, heads, dim, **how):
    q, k, v = meta(n, 3 * heads * dim).unflatten(1, (-1, dim)).split(heads, 1)
    varlen_attention(q, k, v, ints(n), ints(n), scale=0.1, **how)

KINDS = [{}, {"relative": meta(12, 257, dtype=torch.float32)}, {"shape": ScoreShape(slopes=meta(12, dtype=torch.float32))}]
for n in SIZES:
    for dim in DIMS:
        run(n, 12, dim)
        run(n, 12, dim, reach=Reach(64, 64))
    for how in KINDS:
        run(n, 12, 64, **how)
notes = list(COMPILED)
for how in ("sum", "weighted", "max"):
    segments(meta(SIZES[0], 96), ints(9), ints(9), ints(9), how)
notes = [[c.asm["ptx"].count("wgmma.mma_async"), c.metadata.num_warps] for c in notes]
print(json.dumps([notes, len(KEYS)]))
"""


def found_by(how, sizes, dims, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    program = PROGRAM.replace("HOW", how).replace("SIZES", str(sizes)).replace("DIMS", str(dims))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow  # a process that imports torch and quire
def test_sizes_share_compiled_kernels(tmp_path, monkeypatch):
    _, one = found_by("look_up_launches", [64], [64], tmp_path, monkeypatch)
    _, more = found_by("look_up_launches", [64, 65, 1000, 1024], [64], tmp_path, monkeypatch)
    assert one == more


@pytest.mark.slow  # compiling
def test_it_compiles_for_a_hopper_with_its_tensor_cores(tmp_path, monkeypatch):
    notes, _ = found_by("compile_launches", [512, 8192], [32, 64, 96, 128, 256], tmp_path, monkeypatch)
    assert len(notes) >= 12 and all(count > 0 for count, _ in notes)
