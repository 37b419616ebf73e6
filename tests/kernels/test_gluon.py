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
    ptx = kernel.asm["ptx"]
    print(kernel.metadata.shared <= 232448, "wgmma" in ptx or "mma.sync" in ptx, "cp.async.bulk.tensor" in ptx)
"""

PREFILL = """
from quire.kernels.attention import prefill_hopper as attention_prefill_hopper
from quire.kernels.attention import prefill_schedule as attention_prefill_schedule
from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape
from quire.kernels.triton_support import hopper
hopper.available = lambda device: True
for heads, dim, window, shape in (
    (32, 128, 0, PLAIN_SCORES), (16, 256, 1024, ScoreShape(softcap=50.0)), (64, 64, 128, ScoreShape(sinks=meta(64))),
    (56, 96, 0, PLAIN_SCORES),
):
    workspace = attention_prefill_schedule.PrefillWorkspace.allocate(8, 1024, heads, 8, dim, "meta", torch.bfloat16)
    q = meta(1024, (heads + 16) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    cache, config = meta(100, 8, 64, dim), workspace.hopper_config(window, shape)
    attention_prefill_hopper.launch(
        q, cache, cache, ints(9, 64), ints(8), ints(9), ints(8), meta(1024, heads, dim), scale=0.1, workspace=workspace,
        config=config, window=window, shape=shape,
    )
"""

PREFILL_8_BITS = """
from quire.kernels.attention import prefill_hopper as attention_prefill_hopper
from quire.kernels.attention import prefill_schedule as attention_prefill_schedule
from quire.kernels.attention.score_shape import PLAIN_SCORES
for heads, dim, dtype in ((32, 128, torch.float8_e4m3fn), (8, 64, torch.float8_e5m2)):
    workspace = attention_prefill_schedule.PrefillWorkspace.allocate(
        8, 1024, heads, 8, dim, "meta", torch.bfloat16, cache_dtype=dtype
    )
    q = meta(1024, (heads + 16) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    cache, one = meta(100, 8, 64, dim, dtype=dtype), meta(1, dtype=torch.float32)
    attention_prefill_hopper.launch(
        q, cache, cache, ints(9, 64), ints(8), ints(9), ints(8), meta(1024, heads, dim), scale=0.1, workspace=workspace,
        config=workspace.hopper_config(0, PLAIN_SCORES), k_scale=one, v_scale=one,
    )
"""

SCALED = """
from quire.kernels.linear import scaled_hopper as kernel
from quire.kernels.linear.scaled import Scaled
for rows, dtype, gated, parts, blocks in ((1, torch.float8_e4m3fn, False, False, 1), (64, torch.float8_e4m3fn, True, False, 32),
                                          (16, torch.float8_e4m3fn, False, True, 32), (16, torch.int8, False, False, 1),
                                          (1, torch.int8, False, True, 1)):
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, split_k=parts)
    sums = torch.int32 if dtype == torch.int8 else torch.float32
    out = meta(config.parts + 2 * (sums == torch.int32), rows, 4096, dtype=sums) if config.parts > 1 else meta(rows, 4096)
    x = Scaled(meta(rows, 4096, dtype=dtype), meta(rows, blocks, dtype=torch.float32))
    n = 8192 if gated else 4096
    of = 128 if blocks > 1 else 1
    w = Scaled(meta(n, 4096, dtype=dtype), meta(n // of, blocks, dtype=torch.float32), of)
    kernel.launch(x, w, None, out, config, is_gated=gated, pdl=1)
"""

SCALED_WIDE = """
from quire.kernels.linear import scaled_wide as kernel
from quire.kernels.linear.scaled import Scaled
E4M3 = torch.float8_e4m3fn
for rows, dtype, gated, parts, blocks in ((256, E4M3, True, False, 1), (100, E4M3, False, True, 1), (256, E4M3, True, 0, 32),
                                          (256, torch.int8, False, True, 1)):
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, split_k=parts, by_block=blocks > 1)
    sums = torch.int32 if dtype == torch.int8 else torch.float32
    out = meta(config.parts + 2 * (sums == torch.int32), rows, 4096, dtype=sums) if config.parts > 1 else meta(rows, 4096)
    x = Scaled(meta(rows, 4096, dtype=dtype), meta(rows, blocks, dtype=torch.float32))
    n = 8192 if gated else 4096
    of = 128 if blocks > 1 else 1
    w = Scaled(meta(n, 4096, dtype=dtype), meta(n // of, blocks, dtype=torch.float32), of)
    kernel.launch(x, w, None, out, config, is_gated=gated, pdl=1)
"""

W8A16 = """
from quire.kernels.linear import w8a16_hopper as kernel
from quire.kernels.linear.w8a16_weight import Weight8
for rows, dtype, gated, parts, group in ((17, torch.float8_e4m3fn, False, False, 4096), (64, torch.int8, True, False, 128),
                                         (33, torch.int8, False, True, 32)):
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, split_k=parts)
    out = meta(config.parts, rows, 4096, dtype=torch.float32) if config.parts > 1 else meta(rows, 4096)
    n = 8192 if gated else 4096
    zeros = meta(n, 4096 // group, dtype=torch.int16) if parts else None
    weight = Weight8(meta(n, 4096, dtype=dtype), meta(n, 4096 // group, dtype=torch.float32), zeros, group)
    kernel.launch(meta(rows, 4096), weight, None, out, config, is_gated=gated, pdl=1)
"""

INT4 = """
from quire.kernels.linear import int4_hopper, int4_row, int4_wide
from quire.kernels.linear.int4_weight import Int4Weight
for gated, zeros in ((False, True), (True, False)):
    config = int4_row.choose(4096, 4096, 132, is_gated=gated, split_k=not gated)
    out = meta(1, 4096) if gated else meta(config.parts, 1, 4096, dtype=torch.float32)
    n = 8192 if gated else 4096
    zeros = meta(32, n, dtype=torch.uint8) if zeros else None
    weight = Int4Weight(meta(n, 512, dtype=torch.int32), meta(32, n), zeros, 128, 4096)
    int4_row.launch(meta(1, 4096), weight, None, out, config, is_gated=gated, pdl=1)
for rows, gated, parts, zeros in ((1, False, True, True), (16, True, False, False), (64, True, False, True),
                                  (100, True, False, False), (256, False, True, True)):
    kernel = int4_wide if rows > 64 else int4_hopper
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, split_k=parts)
    out = meta(config.parts, rows, 4096, dtype=torch.float32) if config.parts > 1 else meta(rows, 4096)
    n = 8192 if gated else 4096
    zeros = meta(32, n, dtype=torch.uint8) if zeros else None
    weight = Int4Weight(meta(n, 512, dtype=torch.int32), meta(32, n), zeros, 128, 4096)
    kernel.launch(meta(rows, 4096), weight, None, out, config, is_gated=gated, pdl=1)
"""

BLOCK = """
from quire.kernels.linear.scaled import Scaled
from quire.kernels.persistent import plan, scaled_block
for hidden, attended, inner, n, dtype, squares, static in (
    (4096, 4096, 14336, 6144, torch.float8_e4m3fn, False, False), (1024, 2048, 3072, 0, torch.int8, False, True),
    (3584, 3584, 18944, 4608, torch.float8_e4m3fn, True, False),
):
    def weight(rows, k):
        shape = (rows // 128, k // 128) if squares else (rows, 1)
        scaled = Scaled(meta(rows, k, dtype=dtype), meta(*shape, dtype=torch.float32), 128 if squares else 1)
        return plan.Weight(scaled, meta(1, dtype=torch.float32) if static else None)
    products = weight(hidden, attended), weight(2 * inner, hidden), weight(hidden, inner)
    block = plan.Block(*products, meta(hidden), 1e-5, squares)
    after = plan.Next(weight(n, hidden), meta(n) if squares else None, meta(hidden), 1e-5) if n else None
    _busy, config = plan.fitting(hidden, attended, inner, 132, squares)
    scaled_block.launch(meta(1, attended), meta(1, hidden), block, after, meta(1, dtype=torch.int64), config, pdl=1)
"""

LINEAR = """
from quire.kernels.linear import linear_hopper as kernel
for rows, gated, parts in ((16, False, False), (64, True, False), (32, False, True)):
    config = kernel.choose(rows, 4096, 4096, 132, is_gated=gated, split_k=parts)
    out = meta(config.parts, rows, 4096, dtype=torch.float32) if parts else meta(rows, 4096)
    kernel.launch(meta(rows, 4096), meta(8192 if gated else 4096, 4096), None, out, config, is_gated=gated, pdl=1)
"""


@pytest.mark.parametrize(
    "body,count",
    [(PREFILL, 4), (PREFILL_8_BITS, 2), (LINEAR, 3), (SCALED, 5), (SCALED_WIDE, 4), (INT4, 7), (W8A16, 3), (BLOCK, 3)],
    ids=["prefill", "prefill_8_bits", "linear", "scaled", "scaled_wide", "int4", "w8a16", "block"],
)
def test_kernels_for_hopper_compile(body, count, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = PROGRAM.replace("{body}", body)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.split() == ["True"] * 3 * count
