"""Operands of an asynchronous wgmma that lie in registers stay there until it is waited for.

ptxas may give such registers to something else too early (triton-lang/triton #9433, #11781; 12.8 and 13.5). The machine code
of every kernel that has such operands is read here, as the installed Triton makes it; on a GPU, sums of integers show one wrong
weight.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from attention_cases import Case, run_prefill
from sass import hazards

pytest.importorskip("triton")

PROGRAM = """
import json, pathlib, sys, tempfile
import hopper_offline
from hopper_offline import COMPILED, ints, meta
import torch
from sass import disassemble, hazards
from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_schedule import DecodeWorkspace
from quire.kernels.attention.prefill import prefill_attention
from quire.kernels.attention.prefill_schedule import PrefillWorkspace
from quire.kernels.attention import prefill_hopper
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.triton_support import hopper

hopper_offline.compile_launches()
hopper.available = lambda device: True
kind, dim, group, window, cache_bytes, shape_name = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
heads, kv_heads, bf16 = 4 * group, 4, torch.bfloat16
cache = meta(100, kv_heads, 64, dim, dtype=bf16 if cache_bytes == 2 else torch.float8_e4m3fn)
q, out = meta(1024, (heads + 2 * kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim)), meta(1024, heads, dim)
slopes, sinks = meta(heads, dtype=torch.float32), meta(heads)
shape = {
    "plain": ScoreShape(),
    "softcap": ScoreShape(softcap=50.0),
    "capped_sinks": ScoreShape(softcap=50.0, sinks=sinks),
    "alibi": ScoreShape(slopes=slopes),
    "rounded_alibi": ScoreShape(slopes=slopes, alibi_scale=0.1, rounds_alibi=True),
    "sinks": ScoreShape(sinks=sinks),
}[shape_name]
arguments = (q, cache, cache, ints(9, 64), ints(8), ints(9), ints(8), out)
if kind == "decode":
    workspace = DecodeWorkspace.allocate(8, heads, kv_heads, dim, 8, "meta", bf16, cache_dtype=cache.dtype)
    decode_attention(*arguments, scale=0.1, workspace=workspace, schedule=workspace.new_schedule(), shape=shape)
else:
    options = {"cache_dtype": cache.dtype, "hopper": kind == "hopper"}
    workspace = PrefillWorkspace.allocate(8, 1024, heads, kv_heads, dim, "meta", bf16, **options)
    given = {"scale": 0.1, "workspace": workspace, "window": window, "shape": shape}
    if kind == "hopper":
        prefill_hopper.launch(*arguments, config=workspace.hopper_config(window, shape), **given)
    else:
        prefill_attention(*arguments, **given)
assert COMPILED[-1].metadata.shared <= hopper.SHARED_BYTES
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps(hazards(disassemble(COMPILED[-1].asm["cubin"], pathlib.Path(folder)))))
"""

# Kind, head size, heads of a group, window, bytes of the cache's elements, what is done to scores.
KERNELS = [("hopper", dim, group, 0, 2, "plain") for dim in (64, 128) for group in (1, 2, 4, 8, 16)]
KERNELS += [("hopper", dim, group, 0, 2, "plain") for dim, group in ((128, 3), (64, 5), (128, 7), (64, 71), (80, 1), (256, 2))]
KERNELS += [("hopper", 128, 4, 1024, 2, "plain"), ("hopper", 64, 8, 128, 2, "sinks"), ("hopper", 128, 2, 0, 2, "softcap")]
KERNELS += [("hopper", 256, 2, window, 2, "softcap") for window in (0, 1024)]
KERNELS += [("hopper", 128, 4, 0, 1, "plain"), ("hopper", 256, 6, 1024, 1, "capped_sinks")]
KERNELS += [("portable", dim, 4, window, size, "plain") for dim in (64, 128, 256) for window in (0, 1024) for size in (1, 2)]
KERNELS += [("decode", dim, 8, 0, 2, "plain") for dim in (64, 128, 256)]
# as Gemma 2, gpt-oss, BLOOM, Falcon, and groups of three have it
KERNELS += [("portable", 256, 2, window, 2, "softcap") for window in (0, 1024)]
KERNELS += [("portable", 64, 8, window, 2, "sinks") for window in (0, 128)]
KERNELS += [
    ("portable", 128, 1, 0, 2, "alibi"),
    ("portable", 64, 1, 0, 2, "rounded_alibi"),
    ("portable", 128, 3, 0, 2, "plain"),
]
KERNELS += [("decode", 256, 8, 0, 2, "softcap"), ("decode", 64, 8, 0, 2, "sinks"), ("decode", 128, 8, 0, 2, "alibi")]


@pytest.mark.slow  # seconds of compiling each
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_no_register_of_a_wgmma_under_way_is_written(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, kernel)], capture_output=True, text=True, timeout=300)
    if "FileNotFoundError" in child.stderr and "nvdisasm" in child.stderr:
        pytest.skip("this Triton has no disassembler")
    assert child.returncode == 0, child.stderr[-3000:]
    count, found = json.loads(child.stdout)
    assert count >= 4 and found == []


WEIGHTS = """
import json, pathlib, sys, tempfile
import hopper_offline
from hopper_offline import COMPILED, meta
import torch
from sass import disassemble, hazards
from quire.kernels.linear import int4, scaled, w8a16, w8a16_hopper
from quire.kernels.linear.int4_weight import Int4Weight
from quire.kernels.linear.w8a16_weight import Weight8

hopper_offline.compile_launches()
rows, x, out = 64, meta(64, 1024), meta(64, 512)
if sys.argv[1] == "int4":
    weight = Int4Weight(meta(1024, 128, dtype=torch.int32), meta(8, 1024), meta(8, 1024, dtype=torch.uint8), 128, 1024)
    int4.launch(x, weight, None, out, int4.choose(64, 512, 128), is_gated=True)
else:
    zeros = meta(1024, 8, dtype=torch.int16)
    weight = Weight8(meta(1024, 1024, dtype=torch.int8), meta(1024, 8, dtype=torch.float32), zeros, 128)
    if sys.argv[1] == "w8a16":
        w8a16.launch(x, weight, None, out, scaled.choose(64, 512), is_gated=True)
    else:
        w8a16_hopper.launch(x, weight, None, out, w8a16_hopper.choose(64, 512, 1024, 132, is_gated=True), is_gated=True)
with tempfile.TemporaryDirectory() as folder:
    code = disassemble(COMPILED[-1].asm["cubin"], pathlib.Path(folder))
print(json.dumps(["HGMMA" in code, *hazards(code)]))
"""


@pytest.mark.slow  # seconds of compiling each
@pytest.mark.parametrize("kind", ["int4", "w8a16", "w8a16_hopper"])
def test_dequantized_weights_stay_while_a_wgmma_reads_them(kind, tmp_path, monkeypatch):
    """The portable kernels have none in registers; Hopper's wait for each, for int4 see below."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", WEIGHTS, kind], capture_output=True, text=True, timeout=300)
    if "FileNotFoundError" in child.stderr and "nvdisasm" in child.stderr:
        pytest.skip("this Triton has no disassembler")
    assert child.returncode == 0, child.stderr[-3000:]
    uses_wgmma, operands, found = json.loads(child.stdout)
    assert uses_wgmma and found == [] and (operands > 0) == ("hopper" in kind)


INT4 = """
import json, pathlib, sys, tempfile
import hopper_offline
from hopper_offline import COMPILED, meta
import torch
from sass import disassemble, hazards
from quire.kernels.linear import int4_hopper, int4_wide
from quire.kernels.linear.int4_weight import Int4Weight

hopper_offline.compile_launches()
rows, group, gated, has_zeros, scales, *config = json.loads(sys.argv[1])
zeros = meta(1024 // group, 1024, dtype=torch.uint8) if has_zeros else None
scales = meta(1024 // group, 1024, dtype=getattr(torch, scales))
weight = Int4Weight(meta(1024, 128, dtype=torch.int32), scales, zeros, group, 1024)
kernel = int4_wide if rows > 64 else int4_hopper
n = 512 if gated else 1024
config = kernel.Config(*config) if config else kernel.choose(rows, n, 1024, 132, is_gated=gated)
out = meta(config.parts, rows, n, dtype=torch.float32) if config.parts > 1 else meta(rows, n)
kernel.launch(meta(rows, 1024), weight, meta(1024), out, config, is_gated=gated)
with tempfile.TemporaryDirectory() as folder:
    code = disassemble(COMPILED[-1].asm["cubin"], pathlib.Path(folder))
print(json.dumps([COMPILED[-1].metadata.shared <= 232448, *hazards(code)]))
"""

# Rows, group, whether gated, whether there are zero points, the scales' type; a configuration.
INT4_CASES = [
    (64, 128, True, False, "bfloat16"),
    (33, 32, False, True, "bfloat16"),
    (256, 128, True, False, "bfloat16", 256, 1, 3, 132),
    (256, 128, False, True, "bfloat16", 256, 1, 3, 132, 4),
    (300, 32, True, True, "bfloat16", 128, 2, 4, 132),
    (128, 64, False, False, "float16", 128, 1, 5, 132, 2),
    (65, 1024, True, True, "float32", 64, 4, 4, 132),
]


@pytest.mark.slow  # seconds of compiling each
@pytest.mark.parametrize("case", INT4_CASES, ids=str)
def test_no_register_of_a_wgmma_on_4_bit_weights_is_written(case, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", INT4, json.dumps(case)], capture_output=True, text=True, timeout=300)
    if "FileNotFoundError" in child.stderr and "nvdisasm" in child.stderr:
        pytest.skip("this Triton has no disassembler")
    assert child.returncode == 0, child.stderr[-3000:]
    fits, count, found = json.loads(child.stdout)
    assert fits and count >= 8 and found == []


CODE = """
.text.kernel:
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24, gsb0 ;
.L_x_0:
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R32, gdesc[UR8], R32, gsb0 ;
        /*0040*/                   {early}
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/                   {between}
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   MOV R40, R32 ;
        /*0090*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("early", "between", "count"),
    [
        ("MOV R44, R1 ;", "MOV R41, R24 ;", 0),  # beside the operand; after the first one has been waited for
        ("MOV R43, R1 ;", "NOP ;", 1),
        ("LDS.128 R36, [R2] ;", "NOP ;", 1),  # R36 to R39 are accumulators of the second
        ("LDS.128 R40, [R2] ;", "NOP ;", 1),
        ("STS.128 [R2], R40 ;", "ISETP.GT.AND P3, PT, R40, R41, PT ;", 0),
        ("F2FP.BF16.F32.PACK_AB R42, R5, R4 ;", "FADD R33, R1, R2 ;", 2),
    ],
)
def test_what_is_written_too_early_is_seen(early, between, count):
    code = CODE.format(early=early, between=between)
    for kind in ("HGMMA.64x16x16.F32.BF16", "IGMMA.64x16x32.S8.S8", "QGMMA.64x16x32.F32.E4M3.E4M3"):
        operands, found = hazards(code.replace("HGMMA.64x16x16.F32.BF16", kind))
        assert operands == 1 and len(found) == count


def integers(case: Case) -> Case:
    """Weights of 1 and 1/2, values of 0 to 4, most of them 0: sums are exact, and few enough that each weight shows."""
    case.scale = 1 / 1.4426950408889634  # ln 2: of scores 0 and 1, powers of two
    first = torch.arange(case.head_dim, device=case.device) == 0
    case.q.copy_(first.expand_as(case.q))
    generator = torch.Generator(case.device).manual_seed(case.seed)
    for cache, high, chance in ((case.k_cache, 2, 1.0), (case.v_cache, 5, 1 / 64)):
        drawn = torch.randint(0, high, cache.shape, generator=generator, device=case.device).float()
        drawn *= torch.rand(cache.shape, generator=generator, device=case.device) < chance
        drawn = drawn * first if cache is case.k_cache else drawn
        cache.copy_(torch.where(cache.isnan() if cache.dtype.itemsize > 1 else cache.float().isnan(), float("nan"), drawn))
    return case


def assert_exact(case: Case, got: torch.Tensor) -> None:
    """But for the rounding of the result, and of one over the sum of the weights."""
    rounding = torch.finfo(case.dtype).eps / 2 * 1.01 + torch.finfo(torch.float32).eps
    torch.testing.assert_close(got.float(), case.expected(), rtol=rounding, atol=0)


ROWS = [[(512, 512)], [(2048, 2048)] * 4, [(3000, 2000), (90, 90), (1025, 700)], [(129 * i, 128) for i in range(1, 20)]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS, ids=["short", "equal", "ragged", "chunks"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (8, 8, 64), (16, 1, 64), (6, 2, 128), (4, 2, 256)], ids=str)
def test_gpu_each_weight_is_in_the_sum(heads, rows, dtype):
    """On a Hopper, its own kernel and the portable one; elsewhere, the portable one twice."""
    for seed, window in ((0, 0), (1, 0), (2, 700)):
        case = integers(Case(rows, *heads, 64, window, dtype=dtype, device="cuda", seed=seed))
        for hopper in (True, False):
            assert_exact(case, run_prefill(case, hopper=hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16 bit", "8 bit"])
def test_gpu_each_weight_is_in_the_sum_of_the_portable_kernel(head_dim, cache_dtype, dtype):
    for seed, window in ((0, 0), (1, 700), (2, 64)):
        shape = {"window": window, "dtype": dtype, "cache_dtype": cache_dtype, "device": "cuda", "seed": seed}
        case = integers(Case([(2000, 1500), (300, 300), (65, 1)], 16, 4, head_dim, 64, **shape))
        assert_exact(case, run_prefill(case))


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 20])
def test_interpreted_sums_of_integers_are_exact(window):
    from quire.kernels.tuning.configs import PrefillConfig

    case = integers(Case([(40, 33), (9, 9)], 4, 2, 16, 16, window=window))
    assert_exact(case, run_prefill(case, config=PrefillConfig(16, 16, 4, 2, 1), num_programs=3))
