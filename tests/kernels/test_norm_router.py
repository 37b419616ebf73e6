"""Addition, norm, router and choice of one row in one launch, against the norm's launch and the router's."""

import msgspec
import pytest
import torch
from kernels.test_experts_routing import ROUTINGS, correction_of

from quire.kernels.elementwise import norm_reference
from quire.kernels.experts.routing_reference import Counting, Routing, route

triton = pytest.importorskip("triton")

from quire.kernels.elementwise.norm import add_rms_norm, rms_norm  # noqa: E402
from quire.kernels.experts import norm_router as fused  # noqa: E402
from quire.kernels.experts import routing as kernels  # noqa: E402
from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN  # noqa: E402
from quire.kernels.tuning.current import current, using  # noqa: E402

EPS = 1e-6
SIZES = [64, 130, 2048, 2880, 4096]  # of the residual stream
MODELS = {
    "Qwen3-30B-A3B": (2048, Routing(num_experts=128, top_k=8, is_normalized=True)),
    "gpt-oss-20b": (2880, Routing(num_experts=32, top_k=4, is_normalized=True)),
    "DeepSeek-V2-Lite": (2048, Routing(num_experts=64, top_k=6)),
    "Qwen3-235B-A22B": (4096, Routing(num_experts=128, top_k=8, is_normalized=True)),
}


def operands(k, routing, dtype, device):
    """x, residual, norm's weight, W, bias, correction."""
    g = torch.Generator().manual_seed(k + routing.num_experts)
    x, residual = (torch.randn(1, k, generator=g).to(device, dtype) for _ in range(2))
    norm_weight = (torch.randn(k, generator=g) + 1).to(device, dtype)
    weight = (torch.randn(routing.num_experts, k, generator=g) / k**0.5).to(device, dtype)
    correction = correction_of(routing)
    bias = torch.randn(routing.num_experts, generator=g).to(device, dtype)
    return x, residual, norm_weight, weight, bias, None if correction is None else correction.to(device)


def in_one_launch(rows=1):
    table = current()
    return using(msgspec.structs.replace(table, experts=msgspec.structs.replace(table.experts, router_rows=rows)))


def counting_of(routing, device, rows=1):
    counts = torch.zeros(routing.num_experts, dtype=torch.int32, device=device)
    return Counting(counts, torch.tensor([rows], dtype=torch.int32, device=device))


def same_as_parts(k, routing, dtype, device, *, adds=True, has_bias=True, held=None, real_rows=1, weighs="rounded", mode=PLAIN):
    """Fused, again and again, as the norm's launch and the router's: sum, ids and weights to the last bit.

    On a GPU the norm's squares may be added up in another order than one warp does, which moves few of h by one rounding: the
    router's choice is compared for the same h.
    """
    x, residual, norm_weight, weight, bias, correction = operands(k, routing, dtype, device)
    x, bias = x if adds else None, bias if has_bias else None
    before, total = residual.clone(), residual.clone()
    want_h = (
        add_rms_norm(x, total, norm_weight, EPS, weighs=weighs) if adds else rms_norm(total, norm_weight, EPS, weighs=weighs)
    )
    options = {"held": held, "pdl": mode}
    want_counting, counting = counting_of(routing, device, real_rows), counting_of(routing, device, real_rows)
    for _ in range(3):
        h, got_total, ids, weights = fused.norm_router(
            x, residual, norm_weight, EPS, weight, routing, bias, correction, counting=counting, weighs=weighs, **options
        )
        with in_one_launch():
            want_ids, want = kernels.router(h, weight, routing, bias, correction, counting=want_counting, **options)
        assert torch.equal(got_total, total) and torch.equal(residual, before)
        assert torch.equal(ids, want_ids) and torch.equal(weights, want)
        if device == "cpu":
            assert torch.equal(h, want_h)
        else:
            assert (h != want_h).sum() <= k // 50
            torch.testing.assert_close(h, want_h, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)
    assert torch.equal(counting.counts, want_counting.counts)
    assert int(counting.counts.sum()) == 3 * routing.top_k * real_rows


@pytest.mark.interpret
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("k", SIZES)
def test_sizes_in_the_interpreter(k, adds):
    same_as_parts(k, Routing(num_experts=5, top_k=2, is_normalized=True), torch.float16, "cpu", adds=adds)


@pytest.mark.interpret
@pytest.mark.parametrize("weighs", ["wide", "plus_one"])
def test_other_weights_in_the_interpreter(weighs):
    same_as_parts(2880, Routing(num_experts=4, top_k=2), torch.float16, "cpu", weighs=weighs)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_in_the_interpreter(name):
    routing = ROUTINGS[name]
    n = routing.num_experts
    same_as_parts(72, routing, torch.float16, "cpu", held=(n // 3, max(n // 2, 1)))
    same_as_parts(72, routing, torch.float16, "cpu", has_bias=False, real_rows=0)


@pytest.mark.interpret
@pytest.mark.parametrize("k", [64, 2880])
def test_float32_is_the_references(k):
    routing = ROUTINGS["groups of two"]
    x, residual, norm_weight, weight, bias, correction = operands(k, routing, torch.float32, "cpu")
    h, total, ids, weights = fused.norm_router(x, residual, norm_weight, EPS, weight, routing, bias, correction)
    want_h = norm_reference.rms_norm(residual + x, norm_weight, EPS)
    want_ids, want = route((want_h.double() @ weight.double().T + bias).float(), routing, correction)
    assert torch.equal(total, residual + x) and torch.equal(ids, want_ids)
    torch.testing.assert_close(h, want_h)
    torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-5)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    routing = Routing(num_experts=8, top_k=2)
    x, residual, norm_weight, weight, _, _ = operands(16, routing, torch.float16, "cpu")

    def launch(x=x, residual=residual, norm_weight=norm_weight, weight=weight, routing=routing):
        fused.norm_router(x, residual, norm_weight, EPS, weight, routing)

    launch()
    for wrong in (
        {"x": x.expand(2, 16), "residual": residual.expand(2, 16)},
        {"x": torch.stack((x, x))},
        {"x": torch.empty(1, 32).half()[:, ::2]},
        {"x": x.float()},
        {"norm_weight": norm_weight[:7]},
        {"weight": weight[:7]},
        {"routing": Routing(num_experts=9, top_k=2)},
    ):
        with pytest.raises(ValueError, match=r"fit|dtype"):
            launch(**wrong)
    wide = operands(4100, routing, torch.float16, "cpu")
    with pytest.raises(ValueError, match="fit"):
        launch(*wide[:4])


@pytest.mark.interpret
def test_one_row_of_16_bits_is_supported():
    x, residual, _, weight, _, _ = operands(64, Routing(num_experts=8, top_k=2), torch.float16, "cpu")
    with in_one_launch(4):
        assert fused.supports(x, residual, weight) and fused.supports(None, residual, weight)
        assert not fused.supports(x.expand(2, 64), residual.expand(2, 64), weight)
        assert not fused.supports(torch.zeros(3, 1, 64), residual, weight)  # parts of a product
        assert not fused.supports(torch.empty(1, 128).half()[:, ::2], residual, weight)
        assert not fused.supports(x.float(), residual.float(), weight.float())
        assert not fused.supports(x, residual, weight.float())
        wide = torch.empty(1, 4097).half()
        assert not fused.supports(wide, wide, torch.empty(8, 4097).half())
    with in_one_launch(0):
        assert not fused.supports(x, residual, weight)


# -------------------------------------------------------------------------------------------------------------- a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [PLAIN, LATE, EARLY])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, mode, on_hopper):
    k, routing = MODELS[name]
    own = {"has_bias": True, "weighs": "wide"} if name == "gpt-oss-20b" else {"has_bias": False}
    same_as_parts(k, routing, dtype, "cuda", adds=mode != LATE, held=(3, 16), mode=mode, **own)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name):
    same_as_parts(130, ROUTINGS[name], torch.bfloat16, "cuda", real_rows=0 if name == "odd" else 1)


@pytest.mark.gpu
def test_a_chain_of_dependents_gives_the_same(on_hopper):
    k, routing = MODELS["Qwen3-30B-A3B"]
    x, residual, norm_weight, weight, _, _ = operands(k, routing, torch.bfloat16, "cuda")

    def chain(mode):
        h, total, found = x, residual, []
        for _ in range(50):  # each link reads what the one before it wrote
            h, total, ids, weights = fused.norm_router(h, total, norm_weight, EPS, weight, routing, pdl=mode)
            found.append((ids, weights))
        return h, total, *(torch.stack(each) for each in zip(*found, strict=True))

    for got, want in zip(chain(EARLY), chain(PLAIN), strict=True):
        assert torch.equal(got, want)
