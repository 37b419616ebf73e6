"""Kernels of quantized experts compile for a Hopper: no spills, shared memory that fits, no wgmma whose registers are written.

The interpreter takes programs that the compiler refuses, and has no bfloat16.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = """
import pathlib, sys, tempfile
import hopper_offline
from hopper_offline import COMPILED, ints, meta
import torch
from sass import disassemble, hazards
from quire.kernels.experts import experts
from quire.kernels.experts.experts_reference import Relu2, SwiGLU
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights
from quire.kernels.experts.scaled_weight import ScaledExperts, ScaledWeights
from quire.kernels.triton_support import hopper

hopper.available = lambda device: sys.argv[3] == "hopper"
hopper_offline.compile_launches()
form, rows, bf16, f32 = sys.argv[1], int(sys.argv[2]), torch.bfloat16, torch.float32

def weight(n, k):
    blocks = -(-k // 128)
    if form == "mx":
        return FourBits(ints(8, n, blocks * 16), ints(8, blocks, n), None, meta(8, n, dtype=f32), 32, k)
    if form.startswith("int4"):
        zeros = meta(8, blocks, n, dtype=torch.uint8) if form == "int4-zeros" else None
        return FourBits(ints(8, n, blocks * 16), meta(8, blocks, n), zeros, None, 128, k)
    by_block, small = form == "fp8-block", torch.int8 if form == "int8" else torch.float8_e4m3fn
    return ScaledExperts(meta(8, n, k, dtype=small), meta(8, blocks if by_block else 1, n, dtype=f32), by_block)

kind = FourBitWeights if form == "mx" or form.startswith("int4") else ScaledWeights
parts, act = (1, Relu2()) if "ungated" in sys.argv else (2, SwiGLU(limit=7.0, offset=1.0))
w, x = kind(weight(parts * 736, 416), weight(416, 736), meta(8, parts * 736), meta(8, 416)), meta(rows, 416)
experts.experts(x, w, ints(rows, 2), meta(rows, 2, dtype=f32), act, meta(rows, 416), pdl=1)
for kernel in COMPILED:
    with tempfile.TemporaryDirectory() as folder:
        code = disassemble(kernel.asm["cubin"], pathlib.Path(folder))
    print(kernel.metadata.shared <= 232448, "STL" not in code, hazards(code)[1] == [])
"""

# For many rows on a Hopper: a few registers may be spilled around a loop; a wgmma is not waited for one by one.
WIDE = (
    PROGRAM.partition("kind = ")[0]
    + """
from quire.kernels.experts import four_bits_wide, wide
from quire.kernels.experts.experts_reference import Weights
from quire.kernels.tuning.default import EXPERTS

module, kind = (wide, Weights) if form == "16" else (four_bits_wide, FourBitWeights)
rules = EXPERTS.wide if form == "16" else EXPERTS.wide_four_bits
config = next(config for _, config in rules if config and config.rows == rows)
parts, act = (1, Relu2()) if "ungated" in sys.argv else (2, SwiGLU(limit=7.0, offset=1.0))
w = (meta(8, parts * 736, 416), meta(8, 416, 736)) if form == "16" else (weight(parts * 736, 416), weight(416, 736))
w = kind(*w, meta(8, parts * 736), meta(8, 416))
module.experts(meta(99, 416), w, ints(99, 2), meta(99, 2, dtype=f32), act, None, config, pdl=1)
print(len(COMPILED) == 4)  # rows in order with the list of tiles, two products, sums
for kernel in COMPILED:
    with tempfile.TemporaryDirectory() as folder:
        code = disassemble(kernel.asm["cubin"], pathlib.Path(folder))
    waits = code.count("WARPGROUP.DEPBAR")
    print(kernel.metadata.shared <= 232448, code.count("STL") <= 12, hazards(code)[1] == [], 2 * waits <= code.count("HGMMA"))
"""
)


@pytest.mark.parametrize("rows", [1, 16, 100, 2000])
@pytest.mark.parametrize("form", ["mx", "int4", "int4-zeros", "fp8", "fp8-block", "int8"])
def test_kernels_of_quantized_experts_compile(form, rows, tmp_path, monkeypatch):
    assert_compiles(PROGRAM, (form, rows, "portable"), tmp_path, monkeypatch)


@pytest.mark.parametrize("form", ["mx", "int4", "int4-zeros", "fp8", "fp8-block", "int8"])
def test_kernels_of_one_row_compile(form, tmp_path, monkeypatch):
    assert_compiles(PROGRAM, (form, 1, "hopper"), tmp_path, monkeypatch)


@pytest.mark.parametrize(("rows", "where"), [(1, "portable"), (1, "hopper"), (100, "portable")])
@pytest.mark.parametrize("form", ["mx", "int4-zeros", "fp8", "fp8-block", "int8"])
def test_kernels_of_experts_without_a_gate_compile(form, rows, where, tmp_path, monkeypatch):
    assert_compiles(PROGRAM, (form, rows, where, "ungated"), tmp_path, monkeypatch)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("form", ["16", "mx", "int4", "int4-zeros"])
def test_kernels_for_many_rows_on_a_hopper_compile(form, rows, tmp_path, monkeypatch):
    assert_compiles(WIDE, (form, rows, "hopper"), tmp_path, monkeypatch)


@pytest.mark.parametrize(("form", "rows"), [("16", 64), ("mx", 32), ("mx", 128), ("int4-zeros", 64)])
def test_kernels_without_a_gate_for_many_rows_compile(form, rows, tmp_path, monkeypatch):
    assert_compiles(WIDE, (form, rows, "hopper", "ungated"), tmp_path, monkeypatch)


LOGITS = """
import pathlib, tempfile
import hopper_offline
from hopper_offline import COMPILED, meta
from sass import disassemble
from quire.kernels.experts import routing

hopper_offline.compile_launches()
for rows in (1, 64, 256):
    routing.router_logits(meta(rows, 2880), meta(32, 2880), pdl=1)
for kernel in COMPILED:
    with tempfile.TemporaryDirectory() as folder:
        code = disassemble(kernel.asm["cubin"], pathlib.Path(folder))
    print(*(line in code for line in ("LDGSTS.E.BYPASS.128",)), "LDG.E.U16" not in code)
"""


def test_logits_are_loaded_by_16_bytes_and_ahead(tmp_path, monkeypatch):
    assert_compiles(LOGITS, (), tmp_path, monkeypatch)


def assert_compiles(program, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    said = child.stdout.split()
    assert len(said) >= 6 and set(said) == {"True"}
