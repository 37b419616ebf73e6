"""Kernels of LoRA adapters: the schedule against a plain loop, the products against torch and against each token alone."""

import dataclasses

import pytest
import torch

from quire.ipc.step.sections import SLOT
from quire.kernels.lora import lora_reference, tables
from quire.kernels.lora.tables import LoraSchedule, LoraWeights, num_tiles
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.kernels.tuning.current import using
from quire.kernels.tuning.default import DEFAULT
from quire.kernels.tuning.fixed import fixed_order

SLOTS = 5


def step_of(rows, num_seqs=7, padding=(0, 0)):
    """Tables and buffers of a step. rows: (tokens, first position, adapter, adapter_from) of each."""
    tables = SlotTables.allocate(num_seqs, 1, 4, "cpu")
    tokens, n = sum(row[0] for row in rows), len(rows)
    step = StepBuffers.allocate(tokens + padding[0], num_seqs, 1, "cpu")
    step.row_slots.fill_(num_seqs)
    step.query_start.fill_(tokens)
    at = 0
    for r, (length, first, adapter, begin) in enumerate(rows):
        tables.params[r, SLOT.at["adapter"]], tables.params[r, SLOT.at["adapter_from"]] = adapter, begin
        step.row_slots[r], step.query_start[r], step.seq_lens[r] = r, at, first + length
        step.positions[at : at + length] = torch.arange(first, first + length)
        at += length
    step.num_rows[0] = n
    return tables, step, tokens + padding[0], n + padding[1]


def weights_of(ranks, sizes, num_inputs, dtype=torch.float32, max_rank=32, seed=0):
    """ranks: of each slot, a list by piece."""
    generator = torch.Generator().manual_seed(seed)
    weights = LoraWeights.allocate(len(ranks), max_rank, num_inputs, list(sizes), dtype, torch.device("cpu"))
    weights.a.fill_(float("nan"))  # what an adapter does not have is never read
    weights.b.fill_(float("nan"))
    for slot, of_pieces in enumerate(ranks):
        for piece, rank in enumerate(of_pieces):
            weights.ranks[slot, piece], weights.scales[slot, piece] = rank, 0.5 + slot
            weights.a[slot, piece, :rank] = torch.randn(rank, num_inputs, generator=generator) * 0.1
            if rank:
                weights.b_of(slot, piece, rank).copy_(torch.randn(weights.b_of(slot, piece, rank).shape, generator=generator))
    return weights


ROWS = [
    pytest.param([(1, 4, -1, 0), (1, 9, 2, 0), (1, 3, 2, 0), (1, 5, 0, 0)], (0, 0), id="decode"),
    pytest.param([(1, 4, 1, 0), (37, 0, 3, 0), (5, 10, -1, 0), (20, 8, 4, 20)], (6, 2), id="mixed"),
    pytest.param([(1, 0, 0, 0)], (0, 0), id="one"),
    pytest.param([(3, 0, -1, 0)], (1, 1), id="base"),
]


def expected_ids(rows, num_tokens):
    ids = [a if first + i >= begin else -1 for n, first, a, begin in rows for i in range(n)]
    return ids + [-1] * (num_tokens - len(ids))


@pytest.mark.parametrize(("rows", "padding"), ROWS)
def test_reference_finds_each_tokens_adapter(rows, padding):
    tables, step, tokens, samples = step_of(rows, padding=padding)
    assert lora_reference.adapter_ids(tables, step, tokens).tolist() == expected_ids(rows, tokens)
    last = [a if first + n - 1 >= begin else -1 for n, first, a, begin in rows]
    assert lora_reference.sample_ids(tables, step, samples, False).tolist() == last + [-1] * padding[1]


def test_reference_adds_scaled_products():
    weights = weights_of([[0, 0], [3, 0], [1, 8]], (5, 6), 9)
    x, y = torch.randn(4, 9), torch.randn(4, 11)
    got = lora_reference.add_lora(x, y.clone(), weights, lora_reference.groups_of(torch.tensor([2, -1, 1, 0]).numpy()))
    want = y.clone()
    want[0, :5] += 2.5 * weights.b_of(2, 0, 1)[:, :1] @ (weights.a[2, 0, :1] @ x[0])
    want[0, 5:] += 2.5 * weights.b_of(2, 1, 8)[:, :8] @ (weights.a[2, 1, :8] @ x[0])
    want[2, :5] += 1.5 * weights.b_of(1, 0, 3)[:, :3] @ (weights.a[1, 0, :3] @ x[2])
    torch.testing.assert_close(got, want)


def scheduled(rows, padding):
    from quire.kernels.lora import schedule

    tables, step, tokens, samples = step_of(rows, padding=padding)
    into = LoraSchedule.allocate(max(tokens, samples), SLOTS, torch.device("cpu"))
    for tensor in (into.ids, into.order, into.tiles, into.counters):
        tensor.fill_(99)  # of the step before
    has_samples = tokens != samples
    schedule.schedule(tables, step, into, tokens, samples, SLOTS, has_windows=False, has_samples=has_samples)
    return tables, step, tokens, samples, into


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "padding"), ROWS)
def test_interpreted_schedule_has_each_token_once(rows, padding):
    tables, step, tokens, samples, into = scheduled(rows, padding)
    lists = [(tokens, lora_reference.adapter_ids(tables, step, tokens))]
    if tokens != samples:
        lists.append((samples, lora_reference.sample_ids(tables, step, samples, False)))
    for which, (count, ids) in enumerate(lists):
        assert into.ids[which, :count].tolist() == ids.tolist()
        found = {}
        for slot, first, length in into.tiles[which, :, : num_tiles(max(tokens, samples), SLOTS)].T.tolist():
            if slot >= 0:
                assert 1 <= length <= 16
                found |= dict.fromkeys(into.order[which, first : first + length].tolist(), slot)
        assert found == {i: SLOTS if slot < 0 else int(slot) for i, slot in enumerate(ids)}


@pytest.fixture(params=[True, False], ids=["by rows", "by tiles"])
def by_rows(request, monkeypatch):
    from quire.kernels.lora import products

    monkeypatch.setattr(products, "by_rows", lambda tokens, slots: request.param)


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "padding"), ROWS)
@pytest.mark.parametrize("num_inputs", [1, 70, 1200])
def test_interpreted_products_equal_the_reference(rows, padding, num_inputs, by_rows):
    from quire.kernels.lora import products

    tables, step, tokens, samples, into = scheduled(rows, padding)
    weights = weights_of([[8, 0, 3], [1, 1, 1], [24, 8, 17], [2, 16, 0], [0, 5, 9]], (70, 1, 33), num_inputs)
    x, y = torch.randn(tokens, num_inputs), torch.randn(tokens, 104)
    ids = lora_reference.adapter_ids(tables, step, tokens)
    want = lora_reference.add_lora(x, y.clone(), weights, lora_reference.groups_of(ids))
    torch.testing.assert_close(products.add_lora(x, y.clone(), weights, into, 0), want, rtol=1e-4, atol=1e-4)
    if tokens == samples:
        return
    ids = lora_reference.sample_ids(tables, step, samples, False)
    x, y = torch.randn(samples, num_inputs), torch.randn(samples, 104)
    want = lora_reference.add_lora(x, y.clone(), weights, lora_reference.groups_of(ids))
    torch.testing.assert_close(products.add_lora(x, y.clone(), weights, into, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
def test_interpreted_sums_are_the_same_in_any_batch(monkeypatch, by_rows):
    from quire.kernels.lora import products

    rows = [(1, 4, 1, 0), (1, 4, 2, 0), (1, 4, 2, 0), (1, 9, 0, 0)]
    weights = weights_of([[8], [16], [24], [1], [1]], (40,), 2200)
    x, y = torch.randn(4, 2200), torch.randn(4, 40)
    _, _, _, _, into = scheduled(rows, (0, 0))
    together = products.add_lora(x, y.clone(), weights, into, 0)
    for i, row in enumerate(rows):
        _, _, _, _, into = scheduled([row], (0, 0))
        assert torch.equal(products.add_lora(x[i : i + 1], y[i : i + 1].clone(), weights, into, 0)[0], together[i])
    assert not into.arrived.any()  # as the next launch needs it
    monkeypatch.setattr(tables, "SMALL_STEP", 2)  # as in a large step
    _, _, _, _, into = scheduled(rows, (0, 0))
    torch.testing.assert_close(products.add_lora(x, y.clone(), weights, into, 0), together, rtol=1e-4, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "padding"), ROWS)
@pytest.mark.parametrize("sizes", [(70, 70), (140,)], ids=["gate, up", "gate|up"])
def test_interpreted_gate_and_up_are_multiplied_with_their_adapters(rows, padding, sizes, by_rows):
    from quire.kernels.elementwise import activation
    from quire.kernels.lora import products

    tables, step, tokens, _, into = scheduled(rows, padding)
    ranks = [[8, 0], [1, 1], [24, 17], [2, 16], [0, 9]]
    weights = weights_of([of_slot[: len(sizes)] for of_slot in ranks], sizes, 600)
    x, y = torch.randn(tokens, 600) * 0.1, torch.randn(tokens, 140)
    ids = lora_reference.adapter_ids(tables, step, tokens)
    added = lora_reference.add_lora(x, y.clone(), weights, lora_reference.groups_of(ids))
    h = products.shrink(x, weights, into, 0)
    got = products.expand_gated(h, y, weights, into, 0)
    torch.testing.assert_close(got, torch.nn.functional.silu(added[:, :70]) * added[:, 70:], rtol=1e-4, atol=1e-4)
    base = [i for i, slot in enumerate(ids) if slot < 0]
    assert torch.equal(got[base], activation.silu_mul(y)[base])


def test_only_halves_are_gate_and_up():
    def of(*sizes):
        return weights_of([[1] * len(sizes)], sizes, 4).is_gate_up

    assert of(6) and of(3, 3) and not of(2, 4) and not of(2, 2, 2)


def test_a_fixed_order_of_sums_has_one_way_for_all_steps():
    assert tables.by_rows(8, 8) and tables.is_large(5000) and tables.tile_of(5000) != tables.tile_of(20)
    with using(fixed_order(DEFAULT)):
        assert not tables.by_rows(8, 8) and not tables.is_large(5000) and tables.tile_of(5000) == tables.tile_of(20)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 64, 300, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_products_equal_the_reference(tokens, dtype):
    from quire.kernels.lora import products, schedule

    generator, device = torch.Generator().manual_seed(tokens), torch.device("cuda")
    ranks = [[8, 0], [1, 1], [24, 17], [2, 16], [32, 9]]
    weights = weights_of(ranks, (104, 104), 1300, dtype)
    ids = torch.randint(-1, SLOTS, (tokens,), generator=generator, dtype=torch.int32)
    x, y = torch.randn(tokens, 1300, generator=generator).to(dtype), torch.randn(tokens, 208, generator=generator).to(dtype)
    want = lora_reference.add_lora(x, y.clone(), weights, lora_reference.groups_of(ids.numpy()))
    gated = torch.nn.functional.silu(want[:, :104].float()) * want[:, 104:].float()
    on_device = {name: getattr(weights, name).to(device) for name in ("a", "b", "ranks", "scales", "blocks")}
    weights = dataclasses.replace(weights, **on_device)
    into, x, y = LoraSchedule.allocate(tokens, SLOTS, device), x.to(device), y.to(device)
    into.ids[0] = ids.to(device)
    schedule.group(into, tokens, SLOTS)
    share = 1e-5 if dtype == torch.float32 else 0.02  # of the largest value

    def assert_close(got, want):
        assert (got.float().cpu() - want.float()).abs().max() <= share * want.float().abs().max()

    for _ in range(2):  # the first leaves the counters as the second needs them
        h = products.shrink(x, weights, into, 0)
        assert_close(products.expand_gated(h, y, weights, into, 0), gated)
        assert_close(products.add_lora(x, y.clone(), weights, into, 0), want)
        assert_close(products.expand(h, y.float().clone(), weights, into, 0), want)  # as a partial sum
