"""Kernels of LoRA adapters for a Hopper GPU that is simulated: they compile, once for all padded sizes of a step."""

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
from quire.kernels.lora import products, schedule
from quire.kernels.lora.tables import LoraSchedule, LoraWeights
from quire.kernels.step.tables import SlotTables, StepBuffers

device = torch.device("meta")
tables, step = SlotTables.allocate(256, 1, 40, device), StepBuffers.allocate(9000, 256, 1, device)
into = LoraSchedule.allocate(9000, 8, device)
GATE_UP = LoraWeights.allocate(8, 16, 4096, [14336, 14336], torch.bfloat16, device)
for tokens, rows in SIZES:
    schedule.schedule(tables, step, into, tokens, rows, 8, has_windows=False, has_samples=tokens != rows)
    for rank, inputs, sizes in ((16, 4096, [4096, 1024, 1024]), (64, 14336, [4096])):
        weights = LoraWeights.allocate(8, rank, inputs, sizes, torch.bfloat16, device)
        products.add_lora(meta(tokens, inputs), meta(tokens, sum(sizes)), weights, into, 0, pdl=PDL)
    h = products.shrink(meta(tokens, 4096), GATE_UP, into, 0, pdl=PDL)
    products.expand_gated(h, meta(tokens, 28672), GATE_UP, into, 0, pdl=PDL)
    table = LoraWeights.allocate(8, 16, 1000, [4096], torch.bfloat16, device, is_table=True)
    products.add_lora(ints(tokens), meta(tokens, 4096), table, into, 0)
notes = [["mma" in c.asm["ptx"], c.metadata.name] for c in COMPILED]
print(json.dumps([notes, len(KEYS)]))
"""

# each launch of a product or norm that computes a part of an adapter
BESIDE = """
import hopper_offline
hopper_offline.compile_launches()
import json, torch
from hopper_offline import COMPILED, ints, meta
from quire.kernels.elementwise import norm
from quire.kernels.elementwise.norm_reference import Term
from quire.kernels.linear import linear, linear_hopper, norm_linear
from quire.kernels.lora.tables import RANK_STEP, LoraWeights, Shrink
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200

def adapters(k, sizes):
    weights = LoraWeights.allocate(8, 16, k, sizes, torch.bfloat16, torch.device("meta"))
    return weights, Shrink(weights.a, weights.ranks, ints(64))

qkv, of_qkv = adapters(4096, [4096, 1024, 1024])
down, of_down = adapters(14336, [4096])
small, of_small = adapters(1024, [3072, 3072])
with using(H200):
    config, x, y = linear.choose(1, 6144, 4096), meta(1, 4096), meta(1, 6144)
    linear.launch_skinny(x, meta(6144, 4096), None, y, config, shrink=of_qkv, h=of_qkv.new_h(1), pdl=PDL)
    row, gain = meta(1, 1024), meta(1024)
    how = {"shrink": of_small, "adapter_h": of_small.new_h(1), "pdl": PDL}
    norm_linear.norm_linear(row, row, gain, 1e-6, meta(6144, 1024), None, **how)
    linear_hopper.shrinking_linear(meta(64, 4096), meta(6144, 4096), None, None, of_qkv, split_k=False, pdl=PDL)
    y, h = linear_hopper.shrinking_linear(meta(64, 14336), meta(4096, 14336), None, None, of_down, split_k=True, pdl=PDL)
    assert y.shape == (2, 64, 4096) and h.shape == (2, 64, 16)
    term = Term(h, down.b, down.ranks, down.scales, ints(64), RANK_STEP)
    norm.add_rms_norm(y, meta(64, 4096), meta(4096), 1e-6, term=term, pdl=PDL)
notes = []
for kernel in COMPILED:
    ptx = kernel.asm["ptx"]
    ahead = ptx[: ptx.rindex("griddepcontrol.wait")]
    copies = "cp.async.bulk.tensor" in ahead or ahead.count("v4.b32 {") > 1
    notes.append([kernel.metadata.name, copies, ".local" in ptx, "wgmma" in ptx])
print(json.dumps(notes))
"""


def found_by(how, sizes, tmp_path, monkeypatch, pdl=0):
    return run(PROGRAM.replace("HOW", how).replace("SIZES", str(sizes)).replace("PDL", str(pdl)), tmp_path, monkeypatch)


def run(program, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow  # a process that imports torch and quire
def test_sizes_share_compiled_kernels(tmp_path, monkeypatch):
    _, few = found_by("look_up_launches", [(1, 1), (512, 64), (8192, 256)], tmp_path, monkeypatch)
    _, more = found_by("look_up_launches", [(1, 1), (3, 3), (64, 64), (512, 64), (999, 17), (8192, 256)], tmp_path, monkeypatch)
    assert more == few


@pytest.mark.slow  # compiling
@pytest.mark.parametrize("pdl", [0, 1, 2])
def test_they_compile_for_a_hopper_with_its_tensor_cores(pdl, tmp_path, monkeypatch):
    notes, _ = found_by("compile_launches", [(1, 1), (64, 64), (8192, 256)], tmp_path, monkeypatch, pdl)
    uses = {name for has_mma, name in notes if has_mma}
    assert uses == {"_shrink_kernel", "_expand_kernel", "_gated_kernel"}


@pytest.mark.slow  # compiling
@pytest.mark.parametrize("pdl", [1, 2])
def test_products_and_norms_with_adapters_load_ahead_and_keep_to_registers(pdl, tmp_path, monkeypatch):
    assert run(BESIDE.replace("PDL", str(pdl)), tmp_path, monkeypatch) == [
        ["_vector_kernel", True, False, False],
        ["_norm_linear_kernel", True, False, False],
        ["_kernel", True, False, True],
        ["_kernel", True, False, True],
        ["_norm_kernel", True, False, False],
    ]
