"""Products of scaled 8-bit operands, fp8 and int8, against float64 ones of the dequantized operands."""

import pytest
import torch
from scaled_cases import KINDS, SCALINGS, compare, expected, operands

triton = pytest.importorskip("triton")

from quire.kernels.linear import fp8, scaled, scaled_row  # noqa: E402
from quire.kernels.linear.scaled import Config, Scaled  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE  # noqa: E402

SHAPES = [(5, 64), (33, 448), (130, 160), (256, 384)]  # N, K


def portable(config, pdl=0):
    def run(x, weight, bias, out, gated):
        scaled.launch(x, weight, bias, out, config, is_gated=gated, pdl=pdl)

    return run


def one_row(x, weight, bias, out, gated):
    if weight.rows > 1 and weight.scales.shape[1] == 1:  # blocks that are all of K, as layers spread them
        weight = Scaled(weight.data, weight.scales.repeat_interleave(weight.rows, 0)[: len(weight.data)].contiguous())
    n, k = out.shape[1], x.data.shape[1]
    scaled_row.launch(x, weight, bias, out, scaled_row.choose(n, k), is_gated=gated, pdl=LATE if out.is_cuda else 0)


ROW_SHAPES = [(5, 64), (33, 448), (128, 320), (256, 384)]  # N, K


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_one_row_in_the_interpreter(shape, scaling, gated, dtype):
    if gated and scaling == "block" and shape[0] % 128:
        return  # gate and up would share a block
    compare(one_row, 1, shape, scaling, dtype, "cpu", torch.float32, gated)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (1024, 3072), (6144, 4096), (4096, 14336)], ids=str)
def test_gpu_one_row(shape, scaling, gated, dtype):
    if gated and scaling == "block" and shape[0] % 128:
        return
    compare(one_row, 1, shape, scaling, dtype, "cuda", torch.bfloat16, gated, tolerance=5e-3)


@pytest.mark.gpu
def test_gpu_one_row_of_int8_is_the_reference_to_the_bit():
    x, weight = operands(1, 640, 4096, "row", torch.int8, "cuda")
    out = torch.empty(1, 640, device="cuda", dtype=torch.bfloat16)
    one_row(x, weight, None, out, False)
    sums = (x.data.double() @ weight.data.double().T).float()
    assert torch.equal(out, (sums * x.scales * weight.scales.T).bfloat16())


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 18])
def test_kernel_in_the_interpreter(rows, shape, scaling, dtype, gated):
    compare(portable(Config(16, 32, 4, 1)), rows, shape, scaling, dtype, "cpu", torch.float32, gated)


@pytest.mark.interpret
def test_int8_is_the_reference_to_the_bit():
    x, weight = operands(7, 40, 2048, "row", torch.int8, "cpu")
    out = torch.empty(7, 40)
    scaled.launch(x, weight, None, out, Config(16, 32, 4, 1))
    sums = x.data.int() @ weight.data.int().T
    assert torch.equal(out, sums.float() * x.scales * weight.scales.T)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    x, weight = operands(2, 4, 256, "row", torch.int8, "cpu")
    config = Config(16, 32, 4, 1)
    with pytest.raises(ValueError, match="fit"):
        scaled.launch(x, weight, None, torch.zeros(2, 5), config)
    with pytest.raises(ValueError, match="not computed"):
        scaled.launch(x._replace(data=x.data.to(torch.float8_e4m3fn)), weight, None, torch.zeros(2, 4), config)
    with pytest.raises(ValueError, match="blocks of 128"):
        scaled.launch(x._replace(scales=torch.ones(2, 2)), weight, None, torch.zeros(2, 4), config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 3072), (4096, 14336)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 300])
def test_gpu_portable_kernel(rows, shape, scaling, gated, dtype):
    config = scaled.choose(rows, shape[0])
    compare(portable(config, LATE), rows, shape, scaling, dtype, "cuda", torch.bfloat16, gated, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_gpu_long_sums_of_positive_numbers_keep_their_bits(rows):
    """K = 14336, all positive: what a sum of few bits would lose is 1 % and more."""
    k = 14336
    x = Scaled((torch.rand(rows, k, device="cuda") * 448).to(torch.float8_e4m3fn), torch.ones(rows, 1, device="cuda"))
    w = Scaled((torch.rand(512, k, device="cuda") * 448).to(torch.float8_e4m3fn), torch.full((512, 1), 1e-6, device="cuda"))
    out = torch.empty(rows, 512, device="cuda", dtype=torch.bfloat16)
    scaled.launch(x, w, None, out, scaled.choose(rows, 512))
    want = expected(x, w, None, False)
    assert ((out.double() - want).abs() / want).max() <= 2**-8 * 1.05


@pytest.mark.parametrize(
    ("capability", "cuda", "multiplies"),
    [((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((9, 0), None, False), ((8, 9), "13.0", False),
     ((10, 0), "13.0", False), ((12, 0), "13.0", False)],
)  # fmt: skip
def test_gpus_whose_cublas_multiplies_blocks(capability, cuda, multiplies):
    assert fp8.multiplies_blocks(capability, cuda) == multiplies


def test_what_cublas_takes():
    for scaling in SCALINGS:
        x, weight = operands(80, 256, 512, scaling, torch.float8_e4m3fn, "cpu")
        for with_blocks in (False, True):
            assert fp8.cublas_supports(x, weight, with_blocks=with_blocks) == (scaling == "row" or with_blocks)
    x, weight = operands(80, 256, 520, "row", torch.float8_e4m3fn, "cpu")
    assert not fp8.cublas_supports(x, weight, with_blocks=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 33, 65, 257])
def test_rings_fit_into_the_shared_memory_of_other_gpus(rows, gated):
    """98,304 bytes and more of 101,376 (8.6, 8.9, 12.0), where a Hopper has 232,448."""
    for limit in (101_376, 166_912, 232_448):
        m, n, _, stages = scaled.choose(rows, 8192, is_gated=gated, shared_bytes=limit)
        assert (stages - 1) * 128 * (m + n * (2 if gated else 1)) <= limit
    assert scaled.choose(rows, 8192, is_gated=gated) == scaled.choose(rows, 8192)


@pytest.fixture
def ring():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from quire.kernels.linear import scaled_hopper

    return scaled_hopper


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 3072), (6144, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64])
def test_gpu_ring(rows, shape, scaling, gated, dtype, ring):
    def run(x, weight, bias, out, gated):
        n, k = out.shape[1], x.data.shape[1]
        config = ring.choose(rows, n, k, 132, is_gated=gated, varies=weight.scales.shape[1] == 1)
        ring.launch(x, weight, bias, out, config, is_gated=gated, pdl=LATE)

    compare(run, rows, shape, scaling, dtype, "cuda", torch.bfloat16, gated, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(16, 4, 2, 8), (32, 1, 5, 500), (32, 4, 2, 132), (128, 1, 3, 5), (128, 2, 2, 264)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("scaling", "dtype"), [("row", KINDS[0]), ("block", KINDS[0]), ("row", KINDS[1])], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_gpu_configurations_of_the_ring(rows, scaling, dtype, gated, config, ring):
    """Several tiles a program, rings longer and shorter than a tile, tiles of all sizes; gate and up that share a block."""

    def run(x, weight, bias, out, gated):
        ring.launch(x, weight, bias, out, ring.Config(*config), is_gated=gated, pdl=LATE)

    for shape in ((1000, 2048), (72, 1344)):
        compare(run, rows, shape, scaling, dtype, "cuda", torch.bfloat16, gated, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(64, 2, 3, 8, 1, 24), (128, 1, 5, 132, 1, 60), (64, 4, 2, 132, 1, 20)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_gpu_tiles_of_other_widths(rows, dtype, gated, config, ring):
    def run(x, weight, bias, out, gated):
        ring.launch(x, weight, bias, out, ring.Config(*config), is_gated=gated, pdl=LATE)

    compare(run, rows, (960, 1344), "row", dtype, "cuda", torch.bfloat16, gated, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_gpu_parts_of_the_ring(rows, scaling, dtype, ring):
    x, weight = operands(rows, 1024, 3072, scaling, dtype, "cuda")
    for parts in (2, 3, 8):
        out = torch.full((parts, rows, 1024), float("nan"), device="cuda")
        ring.launch(x, weight, None, out, ring.Config(64, 2, 3, 132, parts))
        want = expected(x, weight, None, False)
        # fp8: tensor cores keep some 14 bits of the 128 products that are summed before float32 takes over
        assert (out.double().sum(0) - want).abs().max() <= 5e-4 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("rows", [3, 64])
def test_gpu_a_row_of_the_ring_does_not_see_its_company(rows, scaling, ring):
    """Rows behind x in shared memory, and those beside it, may be anything, NaN too."""
    x, weight = operands(rows, 640, 1344, scaling, KINDS[0], "cuda")
    others = Scaled(torch.full_like(x.data.view(torch.uint8), 0x7F).view(KINDS[0]), torch.full_like(x.scales, 1e30))
    others.data.view(torch.uint8)[2], others.scales[2] = x.data.view(torch.uint8)[2], x.scales[2]
    got = []
    for given in (x, others):
        out = torch.empty(rows, 640, device="cuda", dtype=torch.bfloat16)
        ring.launch(given, weight, None, out, ring.choose(rows, 640, 1344, 132))
        got.append(out[2])
    assert torch.equal(*got) and bool(got[0].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_gpu_int8_of_the_ring_is_the_reference_to_the_bit(rows, ring):
    x, weight = operands(rows, 640, 4096, "row", torch.int8, "cuda")
    out = torch.empty(rows, 640, device="cuda", dtype=torch.bfloat16)
    ring.launch(x, weight, None, out, ring.choose(rows, 640, 4096, 132))
    sums = (x.data.double() @ weight.data.double().T).float()
    assert torch.equal(out, (sums * x.scales * weight.scales.T).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [1, 64, 65, 130, 300, 513, 2048])
def test_gpu_every_way_of_fp8_agrees(rows, scaling):
    x, weight = operands(rows, 1024, 2048, scaling, torch.float8_e4m3fn, "cuda")
    for bias in (None, torch.randn(1024, device="cuda").bfloat16()):
        want = expected(x, weight, bias, False)
        got = fp8.fp8_linear(x, weight, bias, dtype=torch.bfloat16)
        assert (got.double() - want).abs().max() <= 8e-3 * want.abs().max()  # torch rounds before it adds a bias, and again
    got = fp8.fp8_linear(x, weight, dtype=torch.bfloat16, is_gated=True)
    want = expected(x, weight, None, True)
    assert (got.double() - want).abs().max() <= 2e-2 * want.abs().max()
