"""Routing: the torch path against what each family's formula says, the kernels against the torch path."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from quire.kernels.experts.routing_reference import Counting, Routing, count, own_ids, route

ROUTINGS = {
    "softmax": Routing(num_experts=8, top_k=2),
    "normalized": Routing(num_experts=128, top_k=8, is_normalized=True),
    "one": Routing(num_experts=1, top_k=1),
    "all": Routing(num_experts=5, top_k=5, is_normalized=True),
    "odd": Routing(num_experts=60, top_k=4, scale=2.0),
    "sigmoid": Routing(num_experts=16, top_k=1, scores="sigmoid"),
    "by logits": Routing(num_experts=16, top_k=2, scores="sigmoid", by_logits=True),
    "groups": Routing(num_experts=160, top_k=6, num_groups=8, top_groups=3, scale=16.0),
    "groups of two": Routing(
        num_experts=256, top_k=8, scores="sigmoid", is_normalized=True, eps=1e-20, scale=2.5, num_groups=8, top_groups=4,
        group_top=2,
    ),
    "one group": Routing(
        num_experts=64, top_k=6, scores="sigmoid", is_normalized=True, eps=1e-20, scale=2.446, num_groups=1, top_groups=1,
        group_top=2,
    ),
}  # fmt: skip
BY_NAME = pytest.mark.parametrize("name", ROUTINGS)


def logits_of(routing, rows=9):
    return torch.randn(rows, routing.num_experts, generator=torch.Generator().manual_seed(routing.num_experts)) * 3


def correction_of(routing):
    if routing.scores == "softmax":
        return None
    return torch.randn(routing.num_experts, generator=torch.Generator().manual_seed(1)) * 0.3


def by_hand(logits, routing, correction):
    """One token, as the papers write it."""
    scores = (logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()).tolist()
    choice = logits.tolist() if routing.by_logits else scores
    choice = choice if correction is None else [s + c for s, c in zip(choice, correction.tolist(), strict=True)]
    size = routing.num_experts // routing.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[: routing.group_top]))
    allowed = [e for group in groups[: routing.top_groups] for e in group]
    ids = sorted(allowed, key=lambda e: -choice[e])[: routing.top_k]
    weights = [scores[e] for e in ids]
    if routing.is_normalized:
        weights = [w / (sum(weights) + routing.eps) for w in weights]
    return ids, [w * routing.scale for w in weights]


@BY_NAME
def test_the_torch_path_is_the_formula(name):
    routing = ROUTINGS[name]
    logits, correction = logits_of(routing), correction_of(routing)
    ids, weights = route(logits, routing, correction)
    for t in range(len(logits)):
        want_ids, want = by_hand(logits[t], routing, correction)
        assert ids[t].tolist() == want_ids
        torch.testing.assert_close(weights[t], torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_a_softmax_of_the_chosen_is_a_normalized_softmax():
    routing = Routing(num_experts=32, top_k=4, is_normalized=True)
    logits = logits_of(routing)
    best = logits.topk(4, -1)
    ids, weights = route(logits, routing)
    assert torch.equal(ids, best.indices.int())
    torch.testing.assert_close(weights, best.values.softmax(-1))


def compare(name, device, rows):
    from quire.kernels.experts import routing as kernels

    routing = ROUTINGS[name]
    logits, correction = logits_of(routing, rows).to(device), correction_of(routing)
    correction = None if correction is None else correction.to(device)
    bias = torch.randn(routing.num_experts, generator=torch.Generator().manual_seed(2)).to(device)
    parts = torch.stack([logits * 0.25, logits * 0.75])
    for added in (None, bias):
        ids, weights = kernels.route(parts, routing, added, correction)
        want_ids, want = route(logits if added is None else logits + added, routing, correction)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)


@pytest.mark.interpret
@BY_NAME
def test_the_kernel_in_the_interpreter(name):
    compare(name, "cpu", 5)


def products(rows, experts, hidden, dtype, device):
    from quire.kernels.experts.routing import router_logits

    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden + 8, generator=g).to(device, dtype)[:, :hidden]
    weight = (torch.randn(experts, hidden, generator=g) / hidden**0.5).to(device, dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.shape[1:] == (rows, experts)
    torch.testing.assert_close(logits.sum(0).double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=2e-5)


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "experts", "hidden"), [(1, 1, 16), (3, 60, 130), (17, 33, 64), (70, 8, 257)])
def test_logits_in_the_interpreter(rows, experts, hidden):
    products(rows, experts, hidden, torch.float32, "cpu")


def in_one_launch(name, rows, dtype, device):
    """The router's launch for few rows gives the same choice, again and again; held and counted, too."""
    from quire.kernels.experts import routing as kernels
    from quire.kernels.tuning.current import current, using

    routing = ROUTINGS[name]
    n, g = routing.num_experts, torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 136, generator=g).to(device, dtype)[:, :130]
    weight = torch.randn(n, 130, generator=g).to(device, dtype) / 4
    bias, correction = torch.randn(n, generator=g).to(device, dtype), correction_of(routing)
    correction = None if correction is None else correction.to(device)
    table = current()
    one = msgspec.structs.replace(table, experts=msgspec.structs.replace(table.experts, router_rows=rows))
    logits = F.linear(x.double(), weight.double(), bias.double()).float()
    want_ids, want = route(logits, routing, correction)
    counts = torch.zeros(n, dtype=torch.int32, device=device)
    counting = Counting(counts, torch.tensor([rows], dtype=torch.int32, device=device))
    for _ in range(3):
        with using(one):
            ids, weights = kernels.router(x, weight, routing, bias, correction, held=(1, n), counting=counting)
        assert torch.equal(ids, own_ids(want_ids, 1, n))
        torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-5)
    assert int(counts.sum()) == 3 * rows * routing.top_k


@pytest.mark.interpret
@BY_NAME
def test_a_choice_in_one_launch_in_the_interpreter(name):
    in_one_launch(name, 2, torch.float16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@BY_NAME
def test_a_choice_in_one_launch(name, rows):
    in_one_launch(name, rows, torch.bfloat16, "cuda")


@pytest.mark.interpret
def test_what_is_no_number_never_leads_beyond_the_experts():
    no_numbers("cpu")


def no_numbers(device):
    from quire.kernels.experts import routing as kernels

    for name in ("normalized", "groups of two", "odd"):
        routing = ROUTINGS[name]
        for value in (float("nan"), float("inf"), float("-inf")):
            logits = torch.full((1, 2, routing.num_experts), value, device=device)
            logits[0, 1, ::2] = 1.0
            ids, _ = kernels.route(logits, routing)
            assert ((ids >= 0) & (ids < routing.num_experts)).all()


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["softmax", "odd", "groups of two"])
def test_a_rank_s_own_numbers_and_counts_in_the_interpreter(name):
    own_numbers(name, "cpu")


def own_numbers(name, device):
    """The rank's numbers are those of all experts, moved; padding behind the real rows is not counted."""
    from quire.kernels.experts import routing as kernels

    routing = ROUTINGS[name]
    logits = logits_of(routing, 11).to(device)[None]
    ids, weights = kernels.route(logits, routing)
    counts = torch.zeros(routing.num_experts, dtype=torch.int32, device=device)
    counting = Counting(counts, torch.tensor([7], dtype=torch.int32, device=device))
    first, held = routing.num_experts // 3, routing.num_experts // 2
    for _ in range(2):
        own, same = kernels.route(logits, routing, held=(first, held), counting=counting)
    assert torch.equal(own, own_ids(ids, first, held)) and torch.equal(same, weights)
    assert set(own.unique().tolist()) <= set(range(held + 1)) and (own == held).any() and (own < held).any()
    want = torch.zeros_like(counts)
    count(ids, Counting(want, counting.num_rows))
    assert torch.equal(counts, 2 * want) and int(want.sum()) == 7 * routing.top_k


@pytest.mark.gpu
@BY_NAME
def test_a_rank_s_own_numbers_and_counts(name):
    if ROUTINGS[name].num_experts > ROUTINGS[name].top_k:
        own_numbers(name, "cuda")


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.experts import routing as kernels

    with pytest.raises(ValueError, match="fit"):
        kernels.router_logits(torch.zeros(2, 16), torch.zeros(4, 8))
    with pytest.raises(ValueError, match="8 experts"):
        kernels.route(torch.zeros(1, 2, 4), ROUTINGS["softmax"])
    ids, weights = kernels.route(torch.zeros(1, 0, 8), ROUTINGS["softmax"])
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.gpu
@BY_NAME
def test_the_kernel(name):
    compare(name, "cuda", 333)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "experts", "hidden"), [(1, 128, 2048), (3, 60, 130), (64, 256, 7168), (65, 32, 2880), (8192, 128, 2048)]
)
def test_logits(rows, experts, hidden, dtype):
    products(rows, experts, hidden, dtype, "cuda")


@pytest.mark.gpu
def test_what_is_no_number_never_leads_beyond_the_experts_on_a_gpu():
    no_numbers("cuda")
