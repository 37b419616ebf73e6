"""Kinds of KV groups alone: which blocks they may hit; and a model that has none."""

import random

import pytest
from kv_kinds import kinds_of
from scheduler_harness import Harness

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.kv.pool import NULL_BLOCK, BlockPool
from quire.enginecore.kv.sequence_blocks import SequenceBlocks

BLOCK = 4


def hits_by_trying(windows, cached, most):
    """The most blocks of which each group has all that the next token sees."""
    for length in range(most, 0, -1):
        firsts = [max(length * BLOCK - window + 1, 0) // BLOCK if window else 0 for window in windows]
        if all(set(range(first, length)) <= some for first, some in zip(firsts, cached, strict=True)):
            return length
    return 0


@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8), (5, 13), (0, 0, 6, 17)])
def test_a_hit_is_the_longest_that_all_groups_have(windows):
    r = random.Random(1)
    for _ in range(300):
        kv = KVManager(400, BLOCK, kinds_of(windows), num_slots=2)
        held = SequenceBlocks(b"root", True, hashes=[bytes([i]) for i in range(12)])
        cached = [{i for i in range(12) if r.random() < 0.8} for _ in windows]
        blocks = {}
        for group, some in enumerate(cached):
            for i in some:
                blocks[group, i] = kv.pool.allocate()
                kv.pool.register(group, blocks[group, i], held.hashes[i])
        hits = kv.find_prefix(held, 12 * BLOCK + 1)
        assert hits.num_blocks == hits_by_trying(windows, cached, 12)
        for group, found in enumerate(hits.blocks):
            assert all(b == NULL_BLOCK or b == blocks[group, i] for i, b in enumerate(found))
        assert hits.num_held == sum(b != NULL_BLOCK for found in hits.blocks for b in found)
        assert hits.num_unused == 0  # all are still in use
        kv.pool.release(blocks.values())
        assert kv.find_prefix(held, 12 * BLOCK + 1).num_unused == hits.num_held


def test_a_pool_without_groups_has_its_null_block_alone():
    assert BlockPool(1, 0).usage == 0.0
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1, 1)


@pytest.mark.parametrize("budget", [3, 32])
def test_a_model_without_groups_is_scheduled_by_slots_and_tokens(budget):
    """It needs no block however long its sequences are, and nothing is preempted."""
    h = Harness(windows=(), num_blocks=1, budget=budget, max_num_seqs=3, enable_prefix_caching=False)
    assert h.scheduler.fits(64) and not h.scheduler.fits(65)
    for i in range(7):
        h.add([i] * (3 + 5 * i), max_tokens=9 + i)
    h.run()
    h.assert_right()
    assert len(h.finished) == 7 and h.scheduler.counters.preemptions == 0
    assert not any(len(plan.section("block_updates")) for plan in h.plans)
