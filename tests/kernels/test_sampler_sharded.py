"""A sharded vocabulary: what ranks say of their shards together is the token of the whole row, with kernels and in torch."""

import pytest
import torch
from sampler_harness import KINDS, SLOTS, SamplerHarness

from quire.kernels.sampling import sampler_cpu, sampler_sharded_cpu
from quire.kernels.step.tables import SAMPLER_BLOCK, SHARD_WORDS, ShardedWorkspace
from quire.workers.parallel import Parallel


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def sharded(h, logits, slots, positions, size, kind, random=True):
    """The tokens by `size` ranks; each rank must say the same."""
    sampler = sampler_sharded_cpu
    if kind != "torch":
        from quire.kernels.sampling import sampler_sharded as sampler
    vocab, said = logits.shape[1], []
    slots, positions = (torch.as_tensor(x, dtype=torch.int32).to(h.device) for x in (slots, positions))
    for rank in range(size):
        part = Parallel(rank, size).vocabulary(vocab)
        assert not part.is_whole
        own = logits[:, part.slice].to(h.device)
        workspace = ShardedWorkspace.allocate(len(logits), part.size, h.device)
        said.append(sampler.best_of_shard(own, part.start, slots, positions, h.tables, h.pool, workspace, random=random))
        assert said[-1].shape == (SHARD_WORDS, len(logits)) and said[-1].dtype == torch.int32
    return sampler.choose(torch.stack(said), slots, h.tables, random=random).cpu()


def harness(kind, vocab, rows):
    return SamplerHarness(vocab, "cuda" if kind == "cuda" else "cpu", kind != "torch", rows)


@pytest.mark.parametrize(("vocab", "size"), [(2 * SAMPLER_BLOCK + 7, 2), (4 * SAMPLER_BLOCK, 4), (7 * SAMPLER_BLOCK + 300, 2)])
def test_the_tokens_are_those_of_whole_rows(kind, vocab, size):
    rows = SLOTS
    h = harness(kind, vocab, rows)
    for slot in range(rows):
        h.set(slot, temperature=[0.0, 0.3, 1.0, 1.7][slot % 4], seed=(slot, 5 * slot))
    g = torch.Generator().manual_seed(vocab)
    slots = list(range(rows))
    for position in (1, 77, 4000):
        logits = 3 * torch.randn(rows, vocab, generator=g)
        positions = [position + slot for slot in slots]
        cpu = SamplerHarness(vocab, rows=rows)
        cpu.tables.params.copy_(h.tables.params.cpu())
        want = cpu.sample(logits, slots, positions, filtered=False, processors=False)
        assert torch.equal(sharded(h, logits, slots, positions, size, kind), want)
        greedy = sharded(h, logits, slots, positions, size, kind, random=False)
        assert torch.equal(greedy, logits.argmax(1).int())


def test_the_lowest_of_equals_and_rows_without_sense(kind):
    vocab, inf = 2 * SAMPLER_BLOCK, float("inf")
    h = harness(kind, vocab, 6)
    for slot, temperature in enumerate((0.0, 1.0, 0.0, 1.0, 0.0, 0.0)):
        h.set(slot, temperature=temperature)
    logits = torch.zeros(6, vocab)
    logits[0, [40, 600]] = 5.0
    logits[1:3] = -inf
    logits[3, 700] = inf
    logits[4] = float("nan")
    logits[5, :SAMPLER_BLOCK], logits[5, SAMPLER_BLOCK + 3] = float("nan"), -2.0
    logits[5, SAMPLER_BLOCK + 4 :] = -3.0
    logits[5, SAMPLER_BLOCK : SAMPLER_BLOCK + 3] = -3.0
    got = sharded(h, logits, range(6), [9] * 6, 2, kind)
    assert got.tolist() == [40, 0, 0, 700, 0, SAMPLER_BLOCK + 3]


def test_no_rows(kind):
    h = harness(kind, 1024, 1)
    assert sharded(h, torch.zeros(0, 1024), [], [], 2, kind).tolist() == []


def test_the_race_of_a_part_is_that_of_the_whole():
    """Of one part that is all: the noise knows tokens by their numbers."""
    h = SamplerHarness(1500, rows=3)
    h.set(0, temperature=0.7, seed=(5, 6))
    x = torch.randn(3, 1500, generator=torch.Generator().manual_seed(2)).numpy()
    params = h.tables.host["params"][[0, 0, 0]]
    whole, _ = sampler_cpu.race(x, params, [3, 4, 5])
    shifted, _ = sampler_cpu.race(x, params, [3, 4, 5], SAMPLER_BLOCK)
    assert (whole != shifted).any()
