"""Hopper's products of 65 to 512 rows of scaled 8-bit operands: what is chosen, who computes what, results against float64."""

import pytest
import torch
from scaled_cases import KINDS, SCALINGS, compare, expected, operands

triton = pytest.importorskip("triton")

from msgspec.structs import replace  # noqa: E402

from quire.kernels.elementwise import norm  # noqa: E402
from quire.kernels.linear import fp8, int8, quantize, scaled  # noqa: E402
from quire.kernels.linear.scaled import Scaled  # noqa: E402
from quire.kernels.triton_support import hopper  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN  # noqa: E402
from quire.kernels.tuning.current import current, using  # noqa: E402

LAYERS = [
    (6144, 4096, False),
    (4096, 4096, False),
    (14336, 4096, True),
    (4096, 14336, False),
    (3072, 1024, True),
    (1024, 3072, False),
]
FEW = [(64, 128), (64, 256)]
SMALL, LARGE = [(128, 64), (128, 128)], [(128, 256), (256, 128)]


@pytest.fixture
def wide(monkeypatch):
    from quire.kernels.linear import scaled_wide

    return scaled_wide


@pytest.mark.parametrize("rows", [33, 64, 65, 128, 129, 300, 512])
def test_tiles_fit_into_an_sm(rows, wide):
    for (n, k, gated), split_k, by_block in ((layer, p, b) for layer in LAYERS for p in (False, True) for b in (False, True)):
        how = {"is_gated": gated, "split_k": split_k and not gated, "by_block": by_block}
        config = wide.choose(rows, n, k, 132, **how)
        assert config.stages * wide.stage_bytes(config.block_m, config.block_n) <= wide.SHARED_BYTES and config.stages >= 4
        assert config.block_m * config.block_n <= (128 * 128 if by_block else 128 * 256)
        assert config.parts == 1 or (split_k and not gated and k >= config.parts * wide.MIN_STEPS * 128)
        assert config == wide.choose(wide.bucket(rows), n, k, 132, **how)


def test_few_tiles_are_cut_over_k_where_a_norm_adds_up(wide):
    assert wide.choose(100, 4096, 14336, 132, split_k=True).parts > 1
    assert wide.choose(100, 4096, 14336, 132).parts == 1
    assert wide.choose(512, 65536, 4096, 132, split_k=True).parts == 1
    assert wide.choose(2000, 256, 14336, 132, split_k=True).parts == 1  # a prompt's, whatever its tiles


def test_tiles_of_many_rows_copy_little(wide):
    """What was faster of the 8B, when the GPU was held to its power limit; of int8 it was not measured."""
    for rows in (192, 256):
        assert wide.choose(rows, 14336, 4096, 132, is_gated=True)[:2] == (256, 128)
        assert wide.choose(rows, 4096, 14336, 132, split_k=True) == (128, 128, 7, 132, 2)
        assert wide.choose(rows, 4096, 4096, 132, split_k=True)[:2] == (128, 64)
        assert wide.choose(rows, 14336, 4096, 132, is_gated=True, exact=True)[:2] == (128, 128)


def test_prompts_have_large_tiles_where_registers_hold_them(wide):
    for exact in (False, True):
        assert wide.choose(2048, 6144, 4096, 132, exact=exact) == wide.choose(8192, 6144, 4096, 132, exact=exact)
        assert wide.choose(2048, 6144, 4096, 132, exact=exact)[:2] in wide.LARGE_TILES
    assert wide.choose(2048, 6144, 4096, 132, by_block=True)[:2] in wide.SMALL_TILES


@pytest.fixture
def launched(monkeypatch, wide):
    """Results and configurations of the kernel, which are not computed, on a Hopper that is not there."""
    from quire.kernels.linear import scaled_hopper

    seen = []
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 132)
    monkeypatch.setattr(wide, "launch", lambda x, w, bias, out, config, **how: seen.append((config, out)))
    monkeypatch.setattr(scaled_hopper, "launch", lambda *args, **how: seen.append("few"))
    monkeypatch.setattr(scaled, "launch", lambda *args, **how: seen.append("portable"))
    monkeypatch.setattr(fp8, "cublas", lambda *args: seen.append("cublas"))
    monkeypatch.setattr(torch, "_int_mm", lambda *args: torch.empty(len(args[0]), args[1].shape[1], dtype=torch.int32))
    monkeypatch.setattr(int8, "scale", lambda *args, **how: seen.append("cublas"))
    return seen


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "who"), [(64, "few"), (65, "wide"), (192, "wide"), (193, "cublas"), (2000, "cublas")])
def test_who_computes(rows, who, dtype, scaling, launched):
    n = 6144  # 96 tiles of cuBLAS's, of 256 rows
    x, weight = operands(rows, n, 256, scaling, dtype, "cpu")
    product = int8.int8_linear if dtype == torch.int8 else fp8.fp8_linear
    product(x, weight, dtype=torch.bfloat16)
    if dtype == torch.int8 and rows > 192:
        who = "wide"
    elif rows > 192 and scaling == "block":  # as cuBLAS takes them on such a GPU alone
        who = "portable"
    assert launched[0] == who if who != "wide" else launched[0][1].shape == (rows, n)


@pytest.mark.parametrize(
    ("rows", "n", "who"), [(256, 4096, "wide"), (257, 4096, "cublas"), (512, 2048, "wide"), (513, 128, "cublas")]
)
def test_few_tiles_of_cublas_are_ours(rows, n, who, launched):
    x, weight = operands(rows, n, 128, "row", KINDS[0], "cpu")
    fp8.fp8_linear(x, weight, dtype=torch.bfloat16)
    assert launched[0] == who if who != "wide" else launched[0][1].shape == (rows, n)


def test_the_table_can_leave_it_out(launched):
    x, weight = operands(100, 1024, 512, "row", KINDS[0], "cpu")
    with using(replace(current(), scaled=replace(current().scaled, fp8_wide_rows=0))):
        fp8.fp8_linear(x, weight, dtype=torch.bfloat16)
        assert fp8.split_k(x, weight, None, pdl=0) is None
    assert launched == ["cublas"]


@pytest.mark.parametrize(("n", "rows", "takes"), [(640, 128, True), (576, 128, False), (640, 1, False)])
def test_blocks_of_gate_and_up_need_squares(n, rows, takes, launched):
    """Half a square of the gate is a square's beginning of up: such products are others' work, and so are blocks a row."""
    x, weight = operands(100, n, 512, "block", KINDS[0], "cpu")
    weight = weight if rows > 1 else Scaled(weight.data, weight.scales.repeat_interleave(128, 0)[:n])
    assert fp8.widens(x, weight, is_gated=True) == takes
    assert fp8.widens(x, weight, is_gated=False) == (rows > 1)


def test_parts_of_integers_are_integers(launched):
    x, weight = operands(100, 4096, 14336, "row", torch.int8, "cpu")
    parts = int8.int8_linear_split_k(x, weight, dtype=torch.bfloat16)
    [(config, out)] = launched
    assert out is parts and out.dtype == torch.int32 and out.shape == (config.parts + 2, 100, 4096) and config.parts > 1


@pytest.fixture
def on_hopper(wide):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return wide


def tiled(kernel, tile, parts=1, programs=132):
    stages = min(kernel.SHARED_BYTES // kernel.stage_bytes(*tile), kernel.MAX_STAGES)
    return kernel.Config(*tile, stages if programs > 5 else 2, programs, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FEW + SMALL + LARGE, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("scaling", "dtype"), [("row", KINDS[0]), ("block", KINDS[0]), ("row", KINDS[1]), ("block", KINDS[1])])
def test_gpu_tiles(scaling, dtype, gated, tile, on_hopper):
    """Several tiles a program, rings longer and shorter than a tile, rows and columns that end within one."""

    def run(programs):
        def launch(x, weight, bias, out, gated):
            on_hopper.launch(x, weight, bias, out, tiled(on_hopper, tile, 1, programs), is_gated=gated, pdl=LATE)

        return launch

    for rows, shape in ((65, (192, 1344)), (257, (1024, 448)), (300, (320, 4224)), (512, (1000, 512)), (1300, (1344, 448))):
        if not (gated and scaling == "block" and shape[0] % 64):
            for programs in (132, 5):
                compare(run(programs), rows, shape, scaling, dtype, "cuda", torch.bfloat16, gated, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FEW + SMALL + LARGE, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_gpu_parts(dtype, scaling, tile, on_hopper):
    if dtype == torch.int8 and scaling == "row":
        return  # see the norm behind them, below
    x, weight = operands(200, 1024, 3072, scaling, dtype, "cuda")
    want = expected(x, weight, None, False)
    for parts in (2, 3, 8):
        out = torch.full((parts, 200, 1024), float("nan"), device="cuda")
        on_hopper.launch(x, weight, None, out, tiled(on_hopper, tile, parts))
        assert (out.double().sum(0) - want).abs().max() <= 5e-4 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FEW + SMALL + LARGE, ids=str)
def test_gpu_long_sums_of_positive_numbers_keep_their_bits(tile, on_hopper):
    k = 14336
    x = Scaled((torch.rand(130, k, device="cuda") * 448).to(KINDS[0]), torch.ones(130, 1, device="cuda"))
    w = Scaled((torch.rand(512, k, device="cuda") * 448).to(KINDS[0]), torch.full((512, 1), 1e-6, device="cuda"))
    out = torch.empty(130, 512, device="cuda", dtype=torch.bfloat16)
    on_hopper.launch(x, w, None, out, tiled(on_hopper, tile))
    want = expected(x, w, None, False)
    assert ((out.double() - want).abs() / want).max() <= 2**-8 * 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FEW + SMALL + LARGE, ids=str)
def test_gpu_int8_is_the_reference_to_the_bit(tile, on_hopper):
    x, weight = operands(200, 640, 4096, "row", torch.int8, "cuda")
    out = torch.empty(200, 640, device="cuda", dtype=torch.bfloat16)
    on_hopper.launch(x, weight, None, out, tiled(on_hopper, tile))
    sums = (x.data.double() @ weight.data.double().T).float()
    assert torch.equal(out, (sums * x.scales * weight.scales.T).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (512, 1024), (4096, 14336)], ids=str)
def test_gpu_a_norm_behind_parts_of_integers_is_that_behind_the_product(shape, on_hopper):
    x, weight = operands(200, *shape, "row", torch.int8, "cuda")
    residual = torch.randn(200, shape[0], device="cuda").bfloat16()
    ones, (ours, plain) = torch.ones(shape[0], device="cuda").bfloat16(), (residual.clone(), residual.clone())
    for parts in (2, 4):
        out = torch.empty(parts + 2, 200, shape[0], dtype=torch.int32, device="cuda")
        on_hopper.launch(x, weight, None, out, tiled(on_hopper, (128, 128), parts))
        got = norm.add_rms_norm(out, ours.copy_(residual), ones, 1e-5)
        want = norm.add_rms_norm(int8.int8_linear(x, weight, dtype=torch.bfloat16), plain.copy_(residual), ones, 1e-5)
        assert torch.equal(got, want) and torch.equal(ours, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_gpu_a_row_does_not_see_its_company(scaling, on_hopper):
    x, weight = operands(200, 640, 1344, scaling, KINDS[0], "cuda")
    others = Scaled(torch.full_like(x.data.view(torch.uint8), 0x7F).view(KINDS[0]), torch.full_like(x.scales, 1e30))
    others.data.view(torch.uint8)[130], others.scales[130] = x.data.view(torch.uint8)[130], x.scales[130]
    got = [fp8.fp8_linear(given, weight, dtype=torch.bfloat16)[130] for given in (x, others)]
    assert torch.equal(*got) and bool(got[0].isfinite().all())


@pytest.mark.gpu
def test_gpu_a_graph_of_dependent_launches_is_the_kernels_one_by_one(on_hopper):
    pairs = [(operands(1, 4096, 2048, "row", KINDS[0], "cuda")[1], operands(1, 2048, 2048, "row", KINDS[0], "cuda")[1])] * 3
    start, ones = torch.randn(256, 2048, device="cuda").bfloat16(), torch.ones(2048, device="cuda").bfloat16()

    def run(pdl):
        residual, x = start.clone(), None
        for up, down in pairs:
            h = quantize.rms_norm_quantize(x, residual, ones, 1e-5, KINDS[0], pdl=pdl)
            h = fp8.fp8_linear(h, up, dtype=torch.bfloat16, is_gated=True)
            x = fp8.fp8_linear_split_k(quantize.quantize(h, KINDS[0], pdl=pdl), down, dtype=torch.bfloat16)
        return norm.add_rms_norm(x, residual, ones, 1e-5, pdl=pdl)

    want = run(PLAIN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(LATE)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
