"""A router behind a norm: when both are one launch, and that they choose alike."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers import experts, ops
from quire.workers.layers.experts import Router
from quire.workers.layers.linear import Placement
from quire.workers.layers.norm import LayerNorm, NoNorm, RMSNorm
from quire.workers.parallel import Parallel, Partial


def a_router(**changes):
    router = Router("gate", Routing(num_experts=8, top_k=2), 16, Placement(torch.float32, Parallel()), has_bias=True)
    for parameter in router.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    router.__dict__.update(changes)
    return router


@pytest.mark.parametrize("adds", [False, True])
def test_a_router_behind_a_norm_chooses_as_the_two_do(adds):
    router, norm = a_router(), RMSNorm(16, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 16)
    total = residual + x if adds else residual
    h, got, ids, weights = router.normed(x if adds else None, residual.clone(), norm)
    assert torch.equal(got, total) and torch.equal(h, norm(total))
    for found, want in zip((ids, weights), router(h), strict=True):
        assert torch.equal(found, want)


def test_only_an_rms_norm_of_what_is_whole_is_computed_by_the_router(monkeypatch):
    """What ranks sum first, a norm that scales or is none, a router of rounded inputs: these take two launches."""
    options = 16, 1e-5, torch.float32, torch.device("cpu")
    norm, residual = RMSNorm(*options), torch.randn(1, 16)
    norm.weight.data.fill_(1)
    monkeypatch.setattr(ops, "fuses_norm_route", lambda x, residual, weight: True)
    monkeypatch.setattr(ops, "norm_route", lambda *arguments: arguments[-1])
    x = torch.randn(1, 16)
    assert a_router().normed(x, residual, norm) == a_router().normed(None, residual, norm) == "rounded"
    assert a_router().normed(x, residual, RMSNorm(*options, weighs="wide")) == "wide"
    for other in (RMSNorm(*options, residual_scale=0.5), LayerNorm(*options), NoNorm()):
        assert len(a_router().normed(x, residual.clone(), other)) == 4
    monkeypatch.setattr(experts, "rounded_for", lambda h, stored: h)
    assert len(a_router(_stored="rounded").normed(x, residual.clone(), norm)) == 4
    exchange = SimpleNamespace(add_rms_norm=lambda x, residual, weight, eps: ops.add_rms_norm(2 * x, residual, weight, eps))
    h, total, *_ = a_router().normed(Partial(x, exchange, Parallel()), residual.clone(), norm)
    torch.testing.assert_close(total, residual + 2 * x)
    torch.testing.assert_close(h, norm(total))
