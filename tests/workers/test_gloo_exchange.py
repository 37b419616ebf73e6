"""What ranks on CPUs exchange by gloo, ranks as threads: order, bits, buffers that are used again, and peers that stay away.
And which links stages on GPUs get."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from quire.workers.group.cpu import GlooExchange, GlooLinks
from quire.workers.group.group import Group
from quire.workers.group.place import ExchangeFailed, Place

CPU = torch.device("cpu")


def on_ranks(size: int, run: Callable[[Any, Place], Any], stages: int = 1, timeout_s: float = 20.0) -> list[Any]:
    """run(store, place) of every rank at once."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(store, Place(rank, size, CPU, timeout_s, stages)), range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_formed_in_the_order_of_the_ranks_with_the_same_bits_everywhere(dtype: Any) -> None:
    """Of these numbers every other order, and every rounding on the way, has another sum."""
    parts = torch.tensor([[3.0e8, 1.5, 256.0], [7.0, -0.25, 1.0], [-3.0e8, 2.0**-20, 1.0], [11.0, 1.0e-3, 0.0]]).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    sums = on_ranks(4, lambda store, place: GlooExchange(store, place).all_reduce(parts[place.rank].clone()))
    assert all(total.dtype == dtype and torch.equal(total, expected.to(dtype)) for total in sums)
    turned = (parts[1:].float().sum(0) + parts[0].float()).to(torch.float32)
    assert not torch.equal(turned, expected)  # or this test would see nothing
    assert expected[2] == 258.0 and parts[0, 2].bfloat16() + parts[1, 2].bfloat16() == 256.0


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = [Place(rank, 6, CPU, 1.0, stages=3) for rank in range(6)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.within_stage[:2] for place in places] == [(0, 2), (1, 2)] * 3
    assert {place.within_stage.stages for place in places} == {1}
    assert [[place.in_stage(stage) for stage in (0, -1, 3)] for place in places] == [[0, 4, 0], [1, 5, 1]] * 3


def test_parts_come_in_the_order_of_the_ranks_and_are_the_receivers_own() -> None:
    def run(store: Any, place: Place) -> list[Any]:
        exchange, mine, found = GlooExchange(store, place), torch.full((2,), place.rank), []
        for _ in range(3):
            found.append(exchange.all_gather(mine))
            mine += 10
        return found

    for found in on_ranks(3, run):
        assert [turn[:, 0].tolist() for turn in found] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


def test_what_is_sent_may_be_overwritten_at_once_and_tokens_pass_hidden_states() -> None:
    """Two stages of two ranks: each rank is linked to the same one of the other stage."""

    def first(links: GlooLinks, rank: int) -> list[Any]:
        hidden = torch.empty(2, 4)
        for turn in range(3):
            hidden.fill_(10 * turn + rank)
            links.send_hidden(hidden)
        hidden.fill_(-1)
        return [links.receive_tokens(2).tolist() for _ in range(3)]

    def last(links: GlooLinks, rank: int) -> list[Any]:
        tokens, hidden, found = torch.empty(2, dtype=torch.int32), torch.empty(2, 4), []
        for turn in range(3):
            links.send_tokens(tokens.fill_(100 * turn + rank).clone())
        for _ in range(3):
            links.receive_hidden(hidden)
            found.append(int(hidden.unique()))
        return found

    def run(store: Any, place: Place) -> list[Any]:
        own = GlooLinks(store, place)
        links.append(own)  # kept: what a receiver asks for later is still the sender's
        return (first if place.stage == 0 else last)(own, place.rank % 2)

    links: list[GlooLinks] = []
    received = on_ranks(4, run, stages=2)
    assert received[:2] == [[[0, 0], [100, 100], [200, 200]], [[1, 1], [101, 101], [201, 201]]]
    assert received[2:] == [[0, 10, 20], [1, 11, 21]]


def test_a_peer_that_stays_away_ends_the_wait() -> None:
    def run(store: Any, place: Place) -> str:
        exchange = GlooExchange(store, place)
        if place.rank:
            return store.get("told").decode()  # it waits, and does not take part
        with pytest.raises(ExchangeFailed) as caught:
            exchange.all_reduce(torch.ones(3))
        store.set("told", "yes")
        return str(caught.value)

    said, told = on_ranks(2, run, timeout_s=0.5)
    assert "imed out" in said and told == "yes"


@pytest.mark.parametrize(("one_host", "reaches", "links"), [(True, True, "peer"), (True, False, "nccl"), (False, True, "nccl")])
def test_gpus_that_cannot_reach_each_other_are_linked_by_nccl(one_host, reaches, links, monkeypatch, caplog) -> None:
    pytest.importorskip("triton")
    from quire.workers.group import cuda, nccl_links, peer_links

    monkeypatch.setattr(cuda, "reaches_all", lambda place: reaches)
    monkeypatch.setattr(cuda, "all_agree", lambda mine, device: mine)
    monkeypatch.setattr(peer_links, "PeerLinks", lambda *args: "peer")
    monkeypatch.setattr(nccl_links, "NcclLinks", lambda *args: "nccl")
    group = Group.__new__(Group)
    group._place = Place(0, 2, CPU, 10.0, stages=2, one_host=one_host)
    group._nccl, group._hidden_size, group._dtype = object(), 8, torch.float32  # type: ignore[assignment]
    assert group.links(32, 4) == links
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        ["the GPUs cannot reach each other's memory: NCCL carries what passes between stages, which is slower"]
        if one_host and not reaches
        else []
    )
