"""Products with 4-bit weights against float64 ones with the dequantized weight, and the weight's layout."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import norm_reference  # noqa: E402
from quire.kernels.linear import int4  # noqa: E402
from quire.kernels.linear.int4_norm import int4_norm_linear  # noqa: E402
from quire.kernels.linear.int4_weight import pack, stacked, unpack  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN  # noqa: E402

SHAPES = [(3, 32, 32), (5, 128, 64), (33, 448, 64), (8, 448, 32), (6, 640, 128), (7, 320, 128), (9, 448, -1), (4, 384, 256)]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the largest value: one rounding


def canonical(n, k, group, symmetric, seed=0):
    """q, z and s, and W [N, K] in float64, by the formula."""
    g = torch.Generator().manual_seed(seed + n + k)
    groups = 1 if group < 0 else -(-k // group)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    z = None if symmetric else torch.randint(0, 17, (n, groups), generator=g, dtype=torch.uint8)
    s = (torch.rand(n, groups, generator=g) + 0.5) / k**0.5 / 4
    s = s.bfloat16().float()
    of = torch.zeros(k, dtype=torch.long) if group < 0 else torch.arange(k) // group
    zero = 8 if z is None else z.long()[:, of]
    return q, z, s, (q.long() - zero).double() * s.double()[:, of]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_weight_is_unpacked_exactly(shape, symmetric):
    q, z, s, want = canonical(*shape, symmetric)
    weight = pack(q, z, s, shape[2])
    assert torch.equal(unpack(weight).double(), want)
    assert weight.words.shape == (shape[0], -(-shape[1] // 128) * 16)


def test_the_layout_is_what_its_text_says():
    q = torch.zeros(1, 256, dtype=torch.uint8)
    t, j, h = 2, 5, 1
    q[0, 128 + 32 * t + 2 * j + h] = 9
    words = pack(q, None, torch.ones(1, 2), 128).words
    assert words[0, 16 + j] == 9 << (4 * t + 16 * h) and words.count_nonzero() == 1


@pytest.mark.parametrize(("group", "inputs"), [(16, 128), (96, 384), (32, 33), (48, 96)])
def test_other_groups_are_refused_with_what_would_work(group, inputs):
    with pytest.raises(ValueError, match=r"take 32, 64, a multiple of 128"):
        pack(torch.zeros(2, inputs, dtype=torch.uint8), None, torch.ones(2, -(-inputs // group)), group)


def test_columns_out_of_order_know_their_places():
    q, z, s, _ = canonical(6, 128, 32, False)
    perm = torch.randperm(128)
    weight = pack(q, z, s, 32, perm)
    x, placed = torch.randn(3, 128), torch.empty(3, 128)
    placed[:, weight.places.long()] = x
    assert torch.equal(placed, x[:, weight.perm])


def test_outputs_are_stacked_with_or_without_zero_points():
    weights, wants = [], []
    for seed, symmetric in enumerate((True, False, True)):
        q, z, s, want = canonical(6, 320, 64, symmetric, seed)
        weights.append(pack(q, z, s, 64))
        wants.append(want)
    assert torch.equal(unpack(stacked(weights)).double(), torch.cat(wants))
    assert stacked(weights[::2]).zeros is None
    with pytest.raises(ValueError, match="several groups"):
        stacked([weights[0], pack(q, z, s.repeat_interleave(2, 1), 32)])


def compare(rows, shape, symmetric, dtype, device, *, gated=False, positive=False, pdl=PLAIN, config=None):
    n, k, group = shape
    columns = 2 * n if gated else n
    q, z, s, w = canonical(columns, k, group, symmetric)
    weight = pack(q.to(device), None if z is None else z.to(device), s.to(device, dtype), group)
    w = w.to(device)
    g = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, k + 8, generator=g) if positive else torch.randn(rows, k + 8, generator=g)
    x = x.to(device, dtype)[:, :k]
    bias = torch.randn(columns, generator=g).to(device, dtype) if rows % 2 else None
    out = torch.full((rows + 1, n), 7.0, dtype=dtype, device=device)
    int4.launch(x, weight, bias, out[:rows], config or int4.choose(rows, n, weight.words.shape[1]), is_gated=gated, pdl=pdl)
    want = x.double() @ w.T + (0 if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert (out[:rows].double() - want).abs().max() <= TOLERANCE[dtype] * (4 if gated else 1) * want.abs().max() + 1e-6
    assert (out[rows] == 7).all()


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, pytest.param(17, marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(rows, shape, symmetric, gated):
    compare(rows, shape, symmetric, torch.float32, "cpu", gated=gated)
    if rows == 1:  # several steps over K, an end within a step
        compare(rows, shape, symmetric, torch.float32, "cpu", gated=gated, config=int4.Config(2, 32, 4))


@pytest.mark.interpret
def test_pairs_of_bfloat16_are_read_as_words():
    compare(1, (5, 448, 64), False, torch.bfloat16, "cpu")


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    q, z, s, _ = canonical(4, 128, 32, False)
    weight = pack(q, z, s, 32)
    for x, out in ((torch.zeros(1, 64), torch.zeros(1, 4)), (torch.zeros(65, 128), torch.zeros(65, 4))):
        with pytest.raises(ValueError, match="fit"):
            int4.launch(x, weight, None, out, int4.Config(4, 16, 4))
    with pytest.raises(ValueError, match="dtype"):
        int4.launch(torch.zeros(1, 128), weight, None, torch.zeros(1, 4).half(), int4.Config(4, 16, 4))


@pytest.mark.interpret
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dequantized_weight_is_the_formulas(shape, symmetric):
    weight = pack(*canonical(*shape, symmetric)[:3], shape[2])
    out = torch.full(shape[:2], float("nan"))
    assert torch.equal(int4.dequantize(weight, out), unpack(weight))


def test_which_kernel_of_a_hopper_computes_what(monkeypatch):
    """One row that is neither gated nor in parts goes to the plain cores, what is beyond the table's rows to cuBLAS."""
    from quire.kernels.linear import int4_hopper, int4_wide

    q, z, s, _ = canonical(512, 4096, 128, True)
    weight, seen = pack(q, z, s.bfloat16(), 128), []
    monkeypatch.setattr(int4, "linear_tuning", lambda: SimpleNamespace(norm_linear_weight=512 * 4096 - 1))
    monkeypatch.setattr(int4.hopper, "available", lambda device: True)
    monkeypatch.setattr(int4.hopper, "num_sms", lambda device: 132)
    monkeypatch.setattr(int4_hopper, "launch", lambda x, *_, **how: seen.append("ring"))
    monkeypatch.setattr(int4_wide, "launch", lambda x, *_, **how: seen.append("wide"))
    monkeypatch.setattr(int4, "launch", lambda x, *_, **how: seen.append("plain"))
    monkeypatch.setattr(int4, "dequantize", lambda weight, out: seen.append("cublas") or out)
    for rows, want in ((1, "plain"), (2, "ring"), (64, "ring"), (65, "wide"), (512, "wide"), (513, "cublas")):
        int4.int4_linear(torch.zeros(rows, 4096).bfloat16(), weight)
        assert seen.pop() == want
    for rows, want in ((1, "ring"), (200, "wide")):
        assert int4.int4_linear(torch.zeros(rows, 4096).bfloat16(), weight, is_gated=True).shape == (rows, 256)
        assert int4.int4_linear_split_k(torch.zeros(rows, 4096).bfloat16(), weight).dim() == 3
        assert seen == [want, want]
        seen.clear()
    monkeypatch.setattr(int4, "linear_tuning", lambda: SimpleNamespace(norm_linear_weight=512 * 4096))
    for rows, want in ((1, "plain"), (2, "ring")):
        int4.int4_linear_split_k(torch.zeros(rows, 4096).bfloat16(), weight)
        assert seen.pop() == want


def test_no_rows_are_no_work(monkeypatch):
    monkeypatch.setattr(int4, "dequantize", None)
    q, z, s, _ = canonical(6, 128, 64, False)
    weight = pack(q, z, s, 64)
    assert int4.int4_linear(torch.zeros(0, 128), weight).shape == (0, 6)
    assert int4.int4_linear(torch.zeros(0, 128), weight, is_gated=True).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 4096, 64), (4096, 14336, 128)], ids=str)
def test_gpu_prompts(shape, symmetric):
    q, z, s, _ = canonical(*shape, symmetric)
    weight = pack(q.cuda(), None if z is None else z.cuda(), s.cuda().bfloat16(), shape[2])
    dense = unpack(weight, torch.bfloat16)
    assert torch.equal(int4.dequantize(weight, torch.empty_like(dense)), dense)
    x = torch.randn(600, shape[1], device="cuda").bfloat16()
    assert torch.equal(int4.int4_linear(x, weight), torch.nn.functional.linear(x, dense))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 1024, 128), (1000, 4096, 64), (4096, 14336, 128)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64])
def test_gpu_products(rows, shape, symmetric, gated, dtype):
    compare(rows, shape, symmetric, dtype, "cuda", gated=gated, pdl=LATE if dtype == torch.bfloat16 else PLAIN)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 128, 300])
def test_gpu_error_is_no_more_than_that_of_cublas(rows):
    """K = 14336, all of x and W positive: errors of long sums would add up."""
    q, _, s, _ = canonical(512, 14336, 128, True)
    q = q.clamp(min=9).cuda()
    weight = pack(q, None, s.cuda().bfloat16(), 128)
    x = torch.rand(rows, 14336, device="cuda").bfloat16()
    exact = x.double() @ unpack(weight).double().T
    dense = unpack(weight, torch.bfloat16)
    theirs = (torch.nn.functional.linear(x, dense).double() - x.double() @ dense.double().T).norm()
    assert (int4.int4_linear(x, weight).double() - exact).norm() <= 1.5 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 16, 33, 64, 65, 200, 300])
def test_gpu_each_weight_is_in_the_sum(rows):
    """Sums of small integers are exact: one wrong operand of a tensor core shows."""
    g = torch.Generator("cuda").manual_seed(rows)
    q = torch.randint(6, 11, (1024, 4096), generator=g, device="cuda", dtype=torch.uint8)
    x = torch.randint(0, 2, (rows, 4096), generator=g, device="cuda").bfloat16()
    x *= torch.rand(rows, 4096, generator=g, device="cuda") < 1 / 32
    weight = pack(q, None, torch.ones(1024, 32, device="cuda", dtype=torch.bfloat16), 128)
    want = x.double() @ (q.double() - 8).T
    for _ in range(10):
        assert torch.equal(int4.int4_linear(x, weight).double(), want.bfloat16().double())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 16, 64, 100, 300])
def test_gpu_a_row_is_the_same_whatever_the_others_hold(rows):
    q, z, s, _ = canonical(300, 1024, 128, False)
    weight = pack(q.cuda(), z.cuda(), s.cuda().bfloat16(), 128)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    first = int4.int4_linear(x, weight)[0].clone()
    x[1:] = float("nan")
    assert torch.equal(int4.int4_linear(x, weight)[0], first)


def compare_hopper(rows, shape, symmetric, gated, dtype, config=None, parts=False, pdl=PLAIN, scales=None):
    """Hopper's kernels against the formula; k a multiple of 8, as TMA needs rows of x. int4_wide rounds weights to x's type."""
    from quire.kernels.linear import int4_hopper, int4_wide

    is_wide = rows > 64 or isinstance(config, int4_wide.Config)
    kernel = int4_wide if is_wide else int4_hopper
    n, k, group = shape
    columns = 2 * n if gated else n
    q, z, s, w = canonical(columns, k, group, symmetric)
    weight = pack(q.cuda(), None if z is None else z.cuda(), s.cuda().to(scales or dtype), group)
    w = unpack(weight, dtype).double() if is_wide else w.cuda()
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k + 8, generator=g).cuda().to(dtype)[:, :k]
    bias = torch.randn(columns, generator=g).cuda().to(dtype) if rows % 2 else None
    config = config or kernel.choose(rows, n, k, 132, is_gated=gated, split_k=parts)
    want = x.double() @ w.T + (0 if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert kernel.supports(x, weight) or is_wide
    if config.parts > 1:
        out = torch.full((config.parts, rows, n), float("nan"), dtype=torch.float32, device="cuda")
        kernel.launch(x, weight, bias, out, config, is_gated=gated, pdl=pdl)
        got, tolerance = out.double().sum(0), 1e-5
    else:
        out = torch.full((rows + 1, n), 7.0, dtype=dtype, device="cuda")
        kernel.launch(x, weight, bias, out[:rows], config, is_gated=gated, pdl=pdl)
        assert (out[rows] == 7).all()
        got, tolerance = out[:rows].double(), TOLERANCE[dtype] * (4 if gated else 1)
    assert (got - want).abs().max() <= tolerance * want.abs().max() + 1e-6


HOPPER_SHAPES = [s for s in SHAPES if s[1] % 8 == 0] + [(1024, 1024, 128), (1000, 4096, 64), (4096, 14336, 128), (96, 4096, -1)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", HOPPER_SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 17, 64])
def test_gpu_hopper_products(rows, shape, symmetric, gated, dtype, on_hopper):
    compare_hopper(rows, shape, symmetric, gated, dtype, pdl=LATE if rows > 9 else PLAIN)


HOPPER_CONFIGS = [(4, 1, 3, 500, 1), (8, 1, 4, 40, 1), (8, 2, 2, 132, 1), (4, 2, 4, 7, 1), (4, 1, 5, 264, 4)]
HOPPER_CONFIGS += [(4, 4, 2, 264, 2), (2, 2, 3, 9, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(
    "config",
    [
        (4, 1, 3, 500, 1),
        (8, 1, 4, 40, 1),
        (8, 2, 2, 132, 1),
        (4, 2, 4, 7, 1),
        (4, 1, 5, 264, 4),
        (4, 4, 2, 264, 2),
        (2, 2, 3, 9, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_gpu_hopper_configurations(config, gated, rows, on_hopper):
    """Several tiles a program, rings longer and shorter than a tile, 32 to 128 rows of W (wgmma takes 64), parts."""
    from quire.kernels.linear.int4_hopper import Config

    warps, *ring, parts = config
    config = Config(max(warps, 4 if rows > 16 else 1), *ring, 1 if gated else parts)
    compare_hopper(rows, (1000, 2048, 64), False, gated, torch.bfloat16, config)


FORMS = [("plain", True, torch.bfloat16), ("gated", False, torch.bfloat16), ("parts", False, torch.bfloat16)]
FORMS += [("plain", False, torch.float16), ("gated", True, torch.float16)]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "symmetric", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES[2:4], SHAPES[5], *HOPPER_SHAPES[-3:]], ids=str)
@pytest.mark.parametrize("rows", [65, 100, 128, 255, 256, 300, 512])
def test_gpu_hopper_products_of_many_rows(rows, shape, form, symmetric, dtype, on_hopper):
    pdl = LATE if rows > 200 else PLAIN
    compare_hopper(rows, shape, symmetric, form == "gated", dtype, parts=form == "parts", pdl=pdl)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 64, 129, 300])
@pytest.mark.parametrize(
    "config",
    [(64, 1, 8, 132, 1), (64, 4, 4, 7, 1), (128, 1, 5, 40, 4), (128, 2, 2, 132, 1), (256, 1, 3, 5, 2), (32, 2, 8, 132, 8)],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_gpu_hopper_configurations_of_many_rows(config, gated, rows, on_hopper):
    """Several tiles a program, rings longer and shorter than a tile, parts; scales of another type than x's."""
    from quire.kernels.linear.int4_wide import Config

    config = Config(*config[:4], 1 if gated else config[4])
    compare_hopper(rows, (1000, 2048, 64), False, gated, torch.bfloat16, config, scales=torch.float16)
    compare_hopper(rows, (300, 1408, 128), True, gated, torch.bfloat16, config, scales=torch.float32)


WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 1024), (1024, 3072), (8192, 28672), (96, 448)]


@pytest.mark.parametrize("split_k", [False, True])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_configurations_fit_into_an_sm(shape, split_k):
    """Shared memory, registers for sums, parts that are not empty; and few of them, for each is compiled."""
    pytest.importorskip("triton.experimental.gluon")
    from quire.kernels.linear import int4_hopper, int4_wide

    n, k = shape
    for rows in range(1, 65):
        config = int4_hopper.choose(rows, n, k, 132, split_k=split_k)
        stage = (64 * 64 + int4_hopper.block_rows(rows) * 256) * config.blocks
        assert config.stages * stage * (config.programs // 132) <= int4_hopper.SHARED_BYTES and config.stages >= 1
        assert k > (config.parts - 1) * -(-k // (128 * config.blocks * config.parts)) * 128 * config.blocks
    found = set()
    for rows in range(33, 1025):
        config = int4_wide.choose(rows, n, k, 132, split_k=split_k)
        assert config.stages * int4_wide.stage_bytes(config.block_m, config.stripes) <= int4_wide.SHARED_BYTES
        assert config.stages >= 3 and config.block_m * config.stripes <= int4_wide.MAX_SUMS
        assert k > (config.parts - 1) * -(-k // (128 * config.parts)) * 128 and (split_k or config.parts == 1)
        assert config == int4_wide.choose(int4_wide.bucket(rows), n, k, 132, split_k=split_k)
        found.add(config)
    assert len(found) <= 16


def compare_norm(shape, symmetric, dtype, device, gated):
    n, k, group = shape
    q, z, s, w = canonical(2 * n if gated else n, k, group, symmetric)
    weight = pack(q.to(device), None if z is None else z.to(device), s.to(device, dtype), group)
    g = torch.Generator().manual_seed(k)
    x, residual = (torch.randn(1, k, generator=g).to(device, dtype) for _ in range(2))
    norm_weight, bias = torch.rand(k, generator=g).to(device, dtype), torch.randn(len(q), generator=g).to(device, dtype)
    before = residual.clone()
    for first, added in ((None, None), (x, bias)):
        got, total = int4_norm_linear(first, residual, norm_weight, 1e-5, weight, added, is_gated=gated)
        assert torch.equal(total, residual if first is None else residual + x) and torch.equal(residual, before)
        h = norm_reference.rms_norm(total, norm_weight, 1e-5)
        want = h.double() @ w.to(device).T + (0 if added is None else added.double())
        if gated:
            gate, up = want.chunk(2, -1)
            want = torch.nn.functional.silu(gate) * up
        assert (got.double() - want).abs().max() <= 4 * TOLERANCE[dtype] * want.abs().max() + 1e-5


@pytest.mark.interpret
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[7]], ids=str)
def test_behind_a_norm_in_the_interpreter(shape, symmetric, gated):
    compare_norm(shape, symmetric, torch.float32, "cpu", gated)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [SHAPES[2], (2048, 1024, 128), (1000, 4096, 64)], ids=str)
def test_gpu_behind_a_norm(shape, symmetric, gated):
    compare_norm(shape, symmetric, torch.bfloat16, "cuda", gated)
