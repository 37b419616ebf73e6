"""Rows in the order of experts and the list of tiles: in one launch for few pairs, as `align` and `gather` make them in two."""

import pytest
import torch

from quire.kernels.experts import experts_reference

pytest.importorskip("triton")

from quire.kernels.experts import grouped
from quire.kernels.experts.align import align

LIMIT = grouped.FEW_PAIRS
# T, k, E, H
SHAPES = [(1, 1, 1, 50), (1, 8, 128, 104), (33, 2, 3, 200), (65, 6, 60, 104), (129, 4, 33, 720), (23, 3, 300, 40)]
AT_THE_LIMIT = [(LIMIT // 8, 8, 128, 16), (LIMIT // 6, 6, 64, 16), (LIMIT // 2 - 1, 2, 40, 16), (LIMIT, 1, 5, 16)]


def ids_of(kind, rows, top_k, num_experts):
    g = torch.Generator().manual_seed(rows)
    ids = torch.randint(num_experts, (rows, top_k), generator=g)
    if kind == "one expert's":
        ids = torch.full_like(ids, num_experts // 2)
    elif kind == "few experts'":  # some have none, the first and the last, too
        ids = ids % max(1, num_experts // 3) + num_experts // 3
    elif kind == "others', too":
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.5, ids, num_experts + ids % 2 * 1000)
    elif kind == "others'":
        ids = torch.full_like(ids, num_experts)
    return ids.int()


KINDS = ["any", "one expert's", "few experts'", "others', too", "others'"]


def check(device, dtype, shape, kind, tile, pdl=0, is_one_launch=True):
    """Against plain Python; and both ways alike, where both give values."""
    rows, top_k, num_experts, hidden = shape
    ids = ids_of(kind, rows, top_k, num_experts)
    x = torch.randn(rows, hidden + 8, generator=torch.Generator().manual_seed(hidden)).to(device, dtype)[:, :hidden]
    assert (grouped.ids_at_once(ids.numel()) > 0) == is_one_launch
    on_device = ids.to(device)
    two = grouped.gather(x, align(on_device, num_experts, tile, pdl=pdl), top_k, tile, pdl=pdl)
    one = grouped.arrange(x, on_device, num_experts, tile, pdl=pdl)
    counts = torch.bincount(ids.flatten().clamp(max=num_experts), minlength=num_experts + 1)[:num_experts].tolist()
    ours, begins = sum(counts), [sum(counts[:e]) for e in range(num_experts)]
    tiles = [(e, begins[e] + at, min(tile, counts[e] - at)) for e in range(num_experts) for at in range(0, counts[e], tile)]
    order = experts_reference.align(ids)[:ours]
    for gathered, work in (one, two):
        places = work.places.cpu()
        assert work.tile == tile and places.shape == (4, rows * top_k // tile + num_experts) and len(gathered) == rows * top_k
        assert places[3, 0] == len(tiles) and [tuple(t) for t in places[:3, : len(tiles)].T.tolist()] == tiles
        empty = places[:, len(tiles) :]
        assert (empty[2] == 0).all() and ((empty[0] >= 0) & (empty[0] < num_experts)).all()
        assert torch.equal(work.order[:ours].cpu(), order)
        assert torch.equal(gathered[:ours], x[(order // top_k).long().to(device)])


@pytest.mark.interpret
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "others', too")) for kind in KINDS])
@pytest.mark.parametrize("tile", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_tiles_in_the_interpreter(shape, tile, kind):
    check("cpu", torch.float32, shape, kind, tile)


@pytest.mark.interpret
@pytest.mark.parametrize("tile", [32, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", AT_THE_LIMIT)
def test_as_many_pairs_as_one_launch_takes_in_the_interpreter(shape, tile, monkeypatch):
    monkeypatch.setattr(grouped, "FEW_PAIRS", LIMIT // 32)  # the interpreter runs programs one after the other
    rows, *rest = shape
    check("cpu", torch.float32, (rows // 32, *rest), "few experts'", tile)
    check("cpu", torch.float32, (rows // 32 + 1 + 6 // rest[0], *rest), "any", tile, is_one_launch=False)


@pytest.mark.interpret
def test_rows_longer_than_a_block_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(grouped, "MOST_COLUMNS", 64)
    check("cpu", torch.float32, (9, 3, 4, 150), "any", 16)


@pytest.mark.interpret
def test_ids_of_another_type_are_refused():
    x, ids = torch.zeros(4, 16), torch.zeros(4, 2, dtype=torch.int32)
    for wrong in (ids.long(), ids.T.contiguous().T):
        with pytest.raises(ValueError, match="int32"):
            grouped.arrange(x, wrong, 3, 16)


def test_few_kernels_are_for_all_numbers_of_pairs():
    """A step of another size compiles nothing: `experts.kernel_specialization` tells these apart."""
    from quire.kernels.experts import experts
    from quire.kernels.tuning.current import current

    blocks = {grouped.ids_at_once(pairs): pairs for pairs in range(1, 2 * LIMIT)}
    assert len(blocks) <= 5 and blocks[LIMIT] == LIMIT and blocks[0] == 2 * LIMIT - 1
    assert all(block >= pairs for block, pairs in blocks.items() if block)
    assert current().experts.wide  # of the table that is read where there is no GPU
    met = {}
    for rows in range(1, 700):
        if experts.choose_wide(rows, 8, 128):
            same = met.setdefault(experts.kernel_specialization(rows, 8, 128), grouped.ids_at_once(rows * 8))
            assert same == grouped.ids_at_once(rows * 8)
    assert len(set(met.values())) == 4  # 1024, 2048, 4096, two launches


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, *AT_THE_LIMIT, (256, 8, 128, 2048), (64, 4, 32, 2880), (100, 8, 256, 7168)])
def test_rows_and_tiles(shape, kind):
    for tile, pdl in ((16, 0), (32, 1), (64, 2), (128, 0)):
        check("cuda", torch.bfloat16, shape, kind, tile, pdl)
    check("cuda", torch.float16, (LIMIT // 2 + 1, 2, 40, 16), kind, 64, is_one_launch=False)
