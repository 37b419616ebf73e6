"""`--deterministic`'s kernels: right, and a row's result is the same bits in any batch, chunk and order of equal logits."""

from types import MappingProxyType

import pytest
import torch
from attention_cases import SHAPES, Case, assert_matches, run_prefill

from quire.kernels.sampling.sampler_cpu import prompt_logprobs
from quire.kernels.sampling.top_logits import log_sum_exp, top_logits
from quire.kernels.tuning.current import current, using
from quire.kernels.tuning.default import DEFAULT
from quire.kernels.tuning.fixed import fixed_order
from quire.kernels.tuning.h200 import H200

TOLERANCE = {
    torch.float32: 2e-5,  # one chain over K
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
MANY = [1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 700, 1024, 1025, 1500]  # rows around each change of tiles


@pytest.fixture(autouse=True)
def one_order():
    with using(fixed_order(H200 if torch.cuda.is_available() else DEFAULT)):
        yield


def operands(rows, n, k, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(n + k)
    x = torch.randn(rows, k + 8, generator=g).to(device, dtype)[:, :k]  # rows apart
    weight = (torch.randn(n, k, generator=g) / k**0.5).to(device, dtype)
    return x, weight, torch.randn(n, generator=g).to(device, dtype)


def assert_same(ours, theirs):
    """The same bits on a GPU. The interpreter's products are numpy's, which sums a row by its place in a tile."""
    if ours.is_cuda:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def check_product(x, weight, bias):
    from quire.kernels.linear.linear import skinny_gated, skinny_linear

    whole = skinny_linear(x, weight, bias)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (whole.double() - want).abs().max() <= TOLERANCE[x.dtype] * want.abs().max() + 1e-6
    alone = torch.cat([skinny_linear(row, weight, bias, torch.empty_like(whole[:1])) for row in x.split(1)])
    assert_same(alone, whole)
    if len(weight) % 2 == 0:
        gated = torch.cat([skinny_gated(row, weight, bias) for row in x.split(1)])
        assert_same(gated, skinny_gated(x, weight, bias))


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (17, 33, 70), (5, 64, 64)])
def test_interpreted_product(rows, n, k):
    x, weight, bias = operands(rows, n, k)
    check_product(x, weight, bias if rows % 2 else None)


@pytest.mark.interpret
def test_a_product_that_does_not_fit_is_refused():
    from quire.kernels.linear.fixed import fixed_linear

    x, weight, bias = operands(2, 4, 8)
    with pytest.raises(ValueError, match="do not fit"):
        fixed_linear(x[:, :7], weight)
    with pytest.raises(ValueError, match="do not fit"):
        fixed_linear(x, weight, bias[:3])
    with pytest.raises(ValueError, match="one dtype"):
        fixed_linear(x.half(), weight)
    assert fixed_linear(x[:0], weight).shape == (0, 4)


def check_attention(options=MappingProxyType({}), **changes):
    """Rows' last tokens as chunks of any size, and beside any other rows, have the bits of the whole prompt's."""
    whole = Case([(200, 200)], **changes)
    out = run_prefill(whole, **options).clone()
    if not whole.shape:
        assert_matches(out, whole.expected(), whole.dtype)
    for queries in (1, 2, 37, 130):
        case = Case([(200, queries)], **changes)
        case.k_cache, case.v_cache, case.block_table = whole.k_cache, whole.v_cache, whole.block_table
        case.row_slots, case.q, case.out = whole.row_slots, whole.q[-queries:], torch.empty_like(out[-queries:])
        assert_same(run_prefill(case, **options), out[-queries:])


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 40])
def test_interpreted_attention_does_not_depend_on_chunks(window):
    from quire.kernels.tuning.configs import PrefillConfig

    options = {"config": PrefillConfig(16, 32, 4, 2, 1), "num_programs": 3}
    check_attention(options, window=window, num_heads=2, num_kv_heads=1)


def test_the_first_of_equal_logits_comes_first():
    logits = torch.tensor([[1.0, 3.0, -2.0, 3.0, -0.5, 3.0], [-1.0, -1.0, -1.0, -2.0, float("-inf"), -1.0]])
    values, ids = top_logits(logits.bfloat16(), 5)
    assert ids.tolist() == [[1, 3, 5, 0, 4], [0, 1, 2, 5, 3]]
    assert torch.equal(values, logits.bfloat16().gather(1, ids))


def test_log_probabilities_are_right_and_of_the_row_alone():
    x = torch.randn(7, 1001, generator=torch.Generator().manual_seed(0)) * 9
    torch.testing.assert_close(log_sum_exp(x), x.logsumexp(-1, keepdim=True))
    assert torch.equal(log_sum_exp(x), torch.cat([log_sum_exp(row) for row in x.split(1)]))
    with using(DEFAULT):
        want = prompt_logprobs(x, torch.arange(7), 20)
    for ours, theirs in zip(prompt_logprobs(x, torch.arange(7), 20), want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_table_has_one_choice_for_all_numbers_of_rows():
    table = current()
    assert table.fixed_order and not DEFAULT.fixed_order
    assert table.attention.prefill_hopper == () and len(table.attention.rope_tiles) == 1
    assert table.experts.pair_rows == table.experts.row.max_rows == table.experts.router_rows == 0
    assert table.experts.wide == () and min(tiles.rows for _, tiles in table.experts.tiles) >= 64
    assert all(two_shot == 0 for _, _, two_shot in table.exchange.rows)


# ------------------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (130, 72), (1000, 1003)])
def test_gpu_product_has_one_order(n, k, dtype):
    from quire.kernels.linear.linear import skinny_linear

    x, weight, bias = operands(MANY[-1], n, k, dtype, "cuda")
    whole = skinny_linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert (whole.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max() + 1e-6
    for rows in MANY:
        for first in (0, 7):
            part = x[first : first + rows]
            assert torch.equal(skinny_linear(part, weight, bias), whole[first : first + rows]), (rows, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 64), (7, 1, 128), (16, 8, 256), (3, 1, 80)])
@pytest.mark.parametrize("window", [0, 70])
def test_gpu_attention_does_not_depend_on_chunks(window, heads, dtype):
    check_attention(
        window=window, dtype=dtype, device="cuda", **dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_attention_with_other_scores_does_not_depend_on_chunks(shape):
    check_attention(shape=shape, dtype=torch.bfloat16, device="cuda", num_heads=8, num_kv_heads=2, head_dim=64)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 768, 128, 8), (256, 96, 8, 2), (1024, 512, 32, 4)])
def test_gpu_experts_have_one_order(sizes):
    from quire.kernels.experts.experts import experts
    from quire.kernels.experts.experts_reference import SwiGLU, Weights
    from quire.kernels.experts.routing import router
    from quire.kernels.experts.routing_reference import Routing

    hidden, inner, num_experts, top_k = sizes
    g = torch.Generator().manual_seed(hidden)
    x = torch.randn(MANY[-1], hidden, generator=g).to("cuda", torch.bfloat16)
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    w = Weights(*((torch.randn(s, generator=g) * s[2] ** -0.5).to("cuda", torch.bfloat16) for s in shapes), None, None)
    gate = (torch.randn(num_experts, hidden, generator=g) * hidden**-0.5).to("cuda", torch.bfloat16)
    routing = Routing(num_experts=num_experts, top_k=top_k)
    whole_ids, whole_weights = router(x, gate, routing)
    whole = experts(x, w, whole_ids, whole_weights, SwiGLU(), None)
    for rows in MANY:
        for first in (0, 5):
            some = slice(first, first + rows)
            ids, weights = router(x[some], gate, routing)
            assert torch.equal(ids, whole_ids[some]) and torch.equal(weights, whole_weights[some]), rows
            assert torch.equal(experts(x[some], w, ids, weights, SwiGLU(), None), whole[some]), rows
