"""One row's products with 4-bit weights for Hopper: against the formula on a GPU; configurations anywhere."""

import pytest
import torch

from quire.kernels.linear import int4
from quire.kernels.linear.int4_weight import Int4Weight, pack, unpack
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN

TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the largest value: one rounding
CONFIGS = [(8, 2, 4, 1, 1), (4, 2, 3, 1, 1), (4, 1, 4, 1, 2), (8, 2, 2, 3, 2), (8, 4, 2, 4, 1), (16, 2, 1, 1, 1)]
# gate and up meet in one program, so neither parts nor stretches of K are gated
FORMS = [(c, gated) for c in CONFIGS for gated in (False, True) if not gated or c[3] * c[4] == 1]
SHAPES = [(1000, 4096), (48, 448), (8, 128), (112, 4224), (4096, 14336)]
# sixteen warps have no shared memory left for as long a row
CASES = [(*form, shape) for form in FORMS for shape in SHAPES if form[0][0] < 16 or shape[1] < 14336]


def drawn(n: int, k: int, symmetric: bool, dtype: torch.dtype) -> Int4Weight:
    g = torch.Generator().manual_seed(n + k)
    groups = -(-k // 128)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 17, (n, groups), generator=g, dtype=torch.uint8).cuda()
    return pack(q.cuda(), zeros, (torch.rand(n, groups, generator=g) / 64).cuda().to(dtype), 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("config", "gated", "shape"), CASES, ids=str)
def test_gpu_products_of_one_row(config, shape, symmetric, gated, dtype, on_hopper):
    """Also of rows whose numbers differ by powers of ten."""
    from quire.kernels.linear import int4_row

    config, (n, k) = int4_row.Config(*config), shape
    config = config._replace(stages=min(config.stages, int4_row.max_stages(config, k, 1)))
    columns, pdl = 2 * n if gated else n, LATE if symmetric else PLAIN
    weight = drawn(columns, k, symmetric, dtype)
    g = torch.Generator().manual_seed(n)
    x = torch.randn(1, k, generator=g) * torch.randn(1, k, generator=g).exp() ** 2
    x = (x / x.abs().max()).cuda().to(dtype)
    bias = torch.randn(columns, generator=g).cuda().to(dtype) if n % 3 else None
    want = x.double() @ unpack(weight, torch.float64).T + (0 if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    if config.parts > 1:
        out = torch.full((config.parts, 1, n), float("nan"), dtype=torch.float32, device="cuda")
        int4_row.launch(x, weight, bias, out, config, pdl=pdl)
        got, tolerance = out.double().sum(0), 1e-5
    else:
        out = torch.full((2, n), 7.0, dtype=dtype, device="cuda")
        int4_row.launch(x, weight, bias, out[:1], config, is_gated=gated, pdl=pdl)
        assert (out[1] == 7).all()
        got, tolerance = out[:1].double(), TOLERANCE[dtype] * (4 if gated else 1)
    assert (got - want).abs().max() <= tolerance * want.abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_gpu_a_row_that_is_no_number_has_no_numbers_for_a_result(wrong, on_hopper):
    from quire.kernels.linear import int4_row

    weight = drawn(256, 512, True, torch.bfloat16)
    x, out = torch.ones(1, 512, device="cuda").bfloat16(), torch.zeros(1, 256, device="cuda").bfloat16()
    x[0, 200] = wrong
    int4_row.launch(x, weight, None, out, int4_row.choose(256, 512, 132))
    assert not out.isfinite().any()


@pytest.mark.parametrize("is_gated,split_k", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (4096, 14336), (14336, 4096), (28672, 8192), (18432, 14336)])
def test_configurations_fit_into_an_sm(shape, is_gated, split_k):
    pytest.importorskip("triton.experimental.gluon")
    from quire.kernels.linear import int4_row

    n, k = shape
    config = int4_row.choose(n, k, 132, is_gated=is_gated, split_k=split_k)
    assert int4_row.shared_bytes(config, k) <= int4.hopper.SHARED_BYTES and config.stages >= int4_row.MIN_STAGES
    assert not is_gated or config.parts * config.split == 1
    assert split_k or config.parts == 1


def test_one_row_of_much_is_its_own(monkeypatch):
    """Not of little, of other groups or rows, or of scales in float32."""
    pytest.importorskip("triton.experimental.gluon")
    from quire.kernels.linear import int4_row

    monkeypatch.setattr(int4.hopper, "available", lambda device: True)
    monkeypatch.setattr(int4_row, "LITTLE", 256 * 512 - 1)
    seen = []
    monkeypatch.setattr(int4_row, "launch", lambda x, weight, bias, out, config, **how: seen.append(config.parts))
    q, s = torch.randint(0, 16, (256, 512), dtype=torch.uint8), torch.ones(256, 4).bfloat16()
    weight, x = pack(q, None, s, 128), torch.zeros(1, 512).bfloat16()
    assert int4.int4_linear(x, weight).shape == (1, 256) and seen == [1]
    assert int4.int4_linear(x, weight, is_gated=True).shape == (1, 128) and seen == [1, 1]
    for other in (pack(q, None, s.float(), 128), pack(q, None, torch.ones(256, 8).bfloat16(), 64)):
        assert not int4_row.supports(x, other)
    assert not int4_row.supports(torch.zeros(2, 512).bfloat16(), weight) and not int4_row.supports(x.float(), weight)
    monkeypatch.setattr(int4_row, "LITTLE", 256 * 512)
    assert not int4_row.supports(x, weight)
