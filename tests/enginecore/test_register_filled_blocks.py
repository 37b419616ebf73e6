"""Blocks that decode rows fill are made findable later than their results come, and nobody can tell the difference."""

import numpy as np
import pytest
from scheduler_harness import Harness


def chain(h, seq):
    """The hashes of a sequence's full blocks, from its tokens as the test knows them."""
    name = seq.key >> 8
    hashes, tokens = [], [*seq.prompt.tolist(), *h.outputs[name]]
    h.scheduler.kv.hasher.extend(hashes, seq.blocks.root_hash, np.asarray(tokens, np.int32))
    return hashes


@pytest.mark.parametrize("num_blocks", range(10, 22))
def test_a_sequence_is_never_given_the_hash_of_anothers_tokens(num_blocks):
    h = Harness(num_blocks=num_blocks, block_size=4, max_num_seqs=4, look_ahead=False)
    for n in range(6):
        h.add([n] * (3 + n % 4), max_tokens=24)
    while h.turn():
        for seq in h.sequences.values():
            hashes = chain(h, seq)
            assert seq.blocks.hashes == hashes[: len(seq.blocks.hashes)]
    assert h.scheduler.counters.preemptions > 0 or num_blocks > 18
    h.assert_right()


def test_a_block_is_findable_once_settled_or_as_soon_as_somebody_waits():
    for settles in (True, False):
        h = Harness(num_blocks=60, block_size=4, max_num_seqs=2)
        first = h.add([1, 2, 3], max_tokens=30)
        while len(h.outputs[first]) < 6:  # 8 tokens are computed: two blocks
            h.turn(depth=1)
        pool, hashes = h.scheduler.kv.pool, chain(h, h.sequences[first])
        assert len(hashes) == 2
        if settles:
            h.scheduler.register_filled_blocks()
            assert pool.find(0, hashes[1]) is not None
        second = h.add([1, 2, 3, *h.outputs[first], 4], max_tokens=2)
        h.run()
        assert h.sequences[second].num_cached_tokens == 8
        h.assert_right()
