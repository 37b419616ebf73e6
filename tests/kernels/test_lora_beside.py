"""Products that compute A x of LoRA adapters, and norms that add B h: against the kernels of adapters alone, and against
themselves without adapters."""

import pytest
import torch
from gluon_emulator import Emulator
from test_lora import weights_of

triton = pytest.importorskip("triton")

from quire.kernels.elementwise import norm  # noqa: E402
from quire.kernels.elementwise.norm_reference import Term  # noqa: E402
from quire.kernels.linear import linear, linear_hopper, norm_linear, shrinking  # noqa: E402
from quire.kernels.lora import products, schedule  # noqa: E402
from quire.kernels.lora.tables import RANK_STEP, LoraSchedule, Shrink  # noqa: E402
from quire.kernels.tuning.configs import SkinnyConfig  # noqa: E402
from quire.kernels.tuning.current import using  # noqa: E402
from quire.kernels.tuning.default import DEFAULT  # noqa: E402
from quire.kernels.tuning.fixed import fixed_order  # noqa: E402

RANKS = [[8, 0, 3], [1, 1, 1], [15, 8, 11], [2, 16, 0], [0, 5, 9]]
SIZES = (11, 1, 8)
N = sum(SIZES)


def adapters(k, ids):
    """Weights of five slots, the schedule of rows with these adapters, and what a product's kernel gets."""
    weights = weights_of(RANKS, SIZES, k, max_rank=16)
    into = LoraSchedule.allocate(len(ids), len(RANKS), torch.device("cpu"))
    into.ids[0] = torch.tensor(ids, dtype=torch.int32)
    schedule.group(into, len(ids), len(RANKS))
    return weights, into, Shrink(weights.a, weights.ranks, into.ids[0])


def added(h, y, weights, into):
    """y with the adapters of the rows, of their h: what of h must be zero or unread is tested so, too."""
    return products.expand(h, y.clone(), weights, into, 0)


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("slot", [-1, 2])
@pytest.mark.parametrize(("k", "config"), [(70, SkinnyConfig(False, 8, 128, 4)), (200, SkinnyConfig(False, 1, 128, 4))])
def test_interpreted_product_of_a_row(k, config, slot):
    weights, into, shrink = adapters(k, [slot])
    x, w, bias = torch.randn(1, k), torch.randn(N, k), torch.randn(N)
    y, plain, h = nan(1, N), nan(1, N), nan(1, shrink.width)
    linear.launch_skinny(x, w, bias, y, config, shrink=shrink, h=h)
    linear.launch_skinny(x, w, bias, plain, config)
    assert torch.equal(y, plain)
    want = added(products.shrink(x, weights, into, 0), plain, weights, into)
    torch.testing.assert_close(added(h, y, weights, into), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(plain, want) == (slot < 0)


@pytest.mark.interpret
@pytest.mark.parametrize("slot", [-1, 2])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("k", "config"), [(70, (8, 2)), (33, (1, 4))])
def test_interpreted_norm_and_product_of_a_row(k, config, adds, slot):
    weights, into, shrink = adapters(k, [slot])
    x, residual, gain, w = torch.randn(1, k) if adds else None, torch.randn(1, k), torch.randn(k), torch.randn(N, k)
    h = nan(1, shrink.width)
    how = (x, residual, gain, 1e-6, w, None)
    y, total = norm_linear.norm_linear(*how, shrink=shrink, adapter_h=h, config=config)
    plain, plain_total = norm_linear.norm_linear(*how, config=config)
    assert torch.equal(y, plain) and torch.equal(total, plain_total)
    normed = torch.nn.functional.rms_norm(total, (k,), gain, 1e-6)
    want = added(products.shrink(normed, weights, into, 0), plain, weights, into)
    torch.testing.assert_close(added(h, y, weights, into), want, rtol=1e-4, atol=1e-4)


# one program for all tiles, and several, of which some have only adapters' tiles or end before others; parts of K
@pytest.mark.interpret
@pytest.mark.parametrize("config", [(64, 3, 1, 1), (64, 2, 5, 1), (64, 2, 30, 1), (64, 2, 6, 2)])
@pytest.mark.parametrize("ids", [[2, -1, 4, 0, 2], [3] * 17])
def test_source_of_hoppers_product_on_the_cpu(ids, config, monkeypatch):
    k, n, config = 200, N, linear_hopper.Config(*config)
    weights, into, shrink = adapters(k, ids)
    weights.a.copy_(weights.a.bfloat16())
    shrink = shrink._replace(a=weights.a.bfloat16())
    x, w, bias = (torch.randn(shape).bfloat16() for shape in ((len(ids), k), (n, k), (n,)))
    names = vars(linear_hopper)
    emulator = Emulator(names["_kernel"], {"_wait_for_previous": lambda pdl: None, "_copy_tile": tile})
    monkeypatch.setitem(names, "_kernel", emulator)
    shape, dtype = ((n,), torch.bfloat16) if config.parts == 1 else ((n,), torch.float32)
    many = (config.parts,) if config.parts > 1 else ()
    y, plain = (nan(*many, len(ids), *shape, dtype=dtype) for _ in range(2))
    h = nan(*shrink.new_h(len(ids), config.parts).shape)
    linear_hopper.launch(x, w, bias, y, config, shrink=shrink, h=h)
    linear_hopper.launch(x, w, bias, plain, config)
    assert torch.equal(y, plain)
    first = plain.float() if config.parts == 1 else plain[0]
    want = added(products.shrink(x.float(), weights, into, 0), first, weights, into)
    torch.testing.assert_close(added(h, first, weights, into), want, rtol=1e-3, atol=1e-3)
    assert torch.equal(first[1], want[1]) == (ids[1] < 0)


def tile(w_desc, buffer, ready, number, k, n, rows, gated):
    assert not gated
    from gluon_emulator import copy

    copy(w_desc, [number * rows, k], ready, buffer)


@pytest.mark.interpret
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("h_parts", [0, 3])
def test_interpreted_norm_adds_an_adapters_term(parts, h_parts):
    """To x, or to its partial sums, as `expand` does; rows without an adapter are as without adapters."""
    width, ids, scale = 70, [2, -1, 0, 4], 0.5
    weights = weights_of([[5], [1], [24], [2], [16]], (width,), 8)
    into = LoraSchedule.allocate(4, 5, torch.device("cpu"))
    into.ids[0] = torch.tensor(ids, dtype=torch.int32)
    h = torch.randn(*([h_parts] * (h_parts > 0)), 4, 32)
    for row, slot in enumerate(ids):
        h[..., row, (int(weights.ranks[slot, 0]) + 7) // 8 * 8 if slot >= 0 else 0 :] = float("nan")  # never read
    x, residual, weight = torch.randn(*([parts] * (parts > 0)), 4, width), torch.randn(4, width), torch.randn(width)
    term = Term(h, weights.b, weights.ranks, weights.scales, into.ids[0], RANK_STEP)
    sums, plain, want_sums = residual.clone(), residual.clone(), residual.clone()
    got = norm.add_rms_norm(x, sums, weight, 1e-6, scale=scale, term=term)
    without = norm.add_rms_norm(x, plain, weight, 1e-6, scale=scale)
    products.expand(h, x[0] if parts else x, weights, into, 0)
    want = norm.add_rms_norm(x, want_sums, weight, 1e-6, scale=scale)
    torch.testing.assert_close(sums, want_sums, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1], without[1]) and not torch.allclose(got[0], without[0])


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    _, _, shrink = adapters(70, [0, 1])
    x, w, y = torch.randn(2, 70), torch.randn(64, 70), torch.randn(2, 64)
    with pytest.raises(ValueError, match="one row"):
        linear.launch_skinny(x, w, None, y, SkinnyConfig(False, 4, 128, 4), shrink=shrink, h=shrink.new_h(2))
    assert shrinking.shrinking_linear(x.half(), w.half(), None, None, shrink) is None  # of another type
    n, aligned = shrink.rows * linear_hopper.SHARE, shrink._replace(a=shrink.a[..., :64].contiguous())
    assert linear_hopper.shrinks(2, n, aligned) and not linear_hopper.shrinks(2, n - 1, aligned)
    assert not linear_hopper.shrinks(2, n, shrink)  # rows of A are not 16 bytes apart
    wide = shrink._replace(a=torch.empty(64, 1, 16, 16384, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match="adapter's h"):
        term = Term(torch.empty(3, 16), shrink.a, shrink.ranks, shrink.ranks, shrink.ids, RANK_STEP)
        norm.add_rms_norm(y, y.clone(), torch.ones(64), 1e-6, term=term)
    assert norm.takes_term(4096, 16) and not norm.takes_term(8192, 16)
    with using(fixed_order(DEFAULT)):
        assert not norm.takes_term(4096, 16)
    assert linear_hopper.shrinks(48, 1 << 20, wide) and not linear_hopper.shrinks(47, 1 << 20, wide)  # half a MB a slot
