"""KVManager alone: what a sequence holds, what the prefix cache gives, and who waits for whom."""

import numpy as np
import pytest
from kv_kinds import kinds_of

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.kv.pool import NULL_BLOCK
from quire.enginecore.kv.sequence_blocks import PrefixHits, SequenceBlocks

ROOT = b"root"


def ids(*tokens):
    return np.asarray(tokens, np.int32)


def manager(windows=(0,)):
    return KVManager(40, 4, kinds_of(windows), num_slots=5)


def start(kv, tokens, slot=0, *, compute=True, **more):
    """A sequence with blocks for all its tokens; computed, registered and no longer pending, or just begun."""
    held = SequenceBlocks(ROOT, True, **more)
    kv.hash_known(held, tokens)
    hits = kv.find_prefix(held, len(tokens))
    assert hits.waits_for is None
    kv.attach(held)
    kv.add_pending(held)
    kv.grow(held, slot, kv.blocks_to_grow(held, len(tokens)))
    if compute:
        kv.register(held, len(tokens) // 4)
        kv.remove_pending(held)
    return held


def test_blocks_grow_in_step_and_tables_say_where():
    kv = manager(windows=(0, 8))
    held = SequenceBlocks(ROOT, False)
    kv.find_prefix(held, 9)
    kv.attach(held)
    assert kv.blocks_to_grow(held, 9) == 3 and held.num_blocks == 0
    updates = kv.grow(held, 2, 3)
    assert [(row, index) for row, index, _ in updates] == [(2, 0), (2, 1), (2, 2), (7, 0), (7, 1), (7, 2)]
    assert kv.table_of(held, 2) == updates and kv.blocks_to_grow(held, 12) == 0
    assert held.num_held == 6 == kv.pool.num_used
    kv.check([held])
    kv.free(held)
    kv.check([])
    assert kv.pool.num_used == 0


def test_blocks_needed_of_one_and_of_many():
    kv = manager(windows=(0, 8))
    assert [int(kv.blocks_needed(n)) for n in (1, 16, 17, 40)] == [2, 8, 9, 14]  # behind a window of 8 four blocks do
    assert kv.blocks_needed(np.asarray([1, 40])).tolist() == [2, 14]
    spans = KVManager(40, 4, kinds_of((0, 8)), num_slots=5, max_whole_span=9)  # behind the window a step may have nine tokens
    assert [int(spans.blocks_needed(n)) for n in (17, 40)] == [10, 17]


def test_a_prefix_is_hit_in_whole_blocks_and_never_the_last_token():
    kv = manager()
    first = start(kv, ids(*range(12)))
    again = SequenceBlocks(ROOT, True)
    kv.hash_known(again, ids(*range(12)))
    hits = kv.find_prefix(again, 12)
    assert hits.num_blocks == 2 and hits.blocks == [first.blocks[0][:2]]
    assert kv.find_prefix(again, 13).num_blocks == 3
    kv.find_prefix(again, 12)
    assert kv.attach(again) == again.num_registered == 2
    kv.check([first, again])
    kv.free(first)
    kv.check([again])


@pytest.mark.parametrize("more", [{"use_cache": False}, {"may_hit": False}])
def test_who_may_not_hit_gets_nothing_and_waits_for_nobody(more):
    kv = manager()
    computed, pending = start(kv, ids(*range(8))), start(kv, ids(*range(20, 40)), 1, compute=False)
    for tokens in (ids(*range(9)), ids(*range(20, 40))):
        held = SequenceBlocks(**{"root_hash": ROOT, "use_cache": True, **more})
        kv.hash_known(held, tokens)
        assert kv.find_prefix(held, len(tokens)) == PrefixHits([[]], 0)
    kv.check([computed, pending])


def test_a_window_needs_only_what_it_sees():
    kv = manager(windows=(0, 8))
    first = start(kv, ids(*range(24)))
    kv.release_outside_window(first, 24)  # position 24 sees 17 to 24: the first four blocks are left behind
    assert first.num_released == [0, 4] and first.blocks[1][:4] == [NULL_BLOCK] * 4 and first.num_held == 8
    again = SequenceBlocks(ROOT, True)
    kv.hash_known(again, ids(*range(25)))
    hits = kv.find_prefix(again, 25)
    assert hits.num_blocks == 6 and hits.blocks[1] == [NULL_BLOCK] * 4 + first.blocks[1][4:]
    kv.attach(again)
    assert again.num_released == [0, 4]
    kv.check([first, again])
    while kv.pool.num_available:  # the cached blocks behind the window go
        kv.pool.allocate()
    shorter = SequenceBlocks(ROOT, True)
    kv.hash_known(shorter, ids(*range(13)))
    assert kv.find_prefix(shorter, 13).num_blocks == 0  # its window would see the third block


def test_what_is_wrong_is_not_hit_in_blocks_that_a_window_has_given_back():
    kv = manager(windows=(0, 8))
    tokens = np.arange(49, dtype=np.int32)
    held = start(kv, tokens)
    given_back = set(held.blocks[1][2:10])
    kv.release_outside_window(held, 48)
    assert kv.pool.count_cached(1, held.hashes, 12) == 12
    wrong = {block for blocks in held.blocks for block in blocks[2:]} | given_back
    assert kv.forget(held, 8) == wrong - {NULL_BLOCK}
    kv.free(held)
    again = start(kv, tokens, 1)  # computes everything behind token 8 anew
    assert kv.pool.count_cached(1, again.hashes, 12) == 12
    other = SequenceBlocks(ROOT, True)
    kv.hash_known(other, tokens[:25])
    hits = kv.find_prefix(other, 25)
    assert hits.num_blocks == 6 and hits.blocks == [again.blocks[0][:6], [NULL_BLOCK] * 4 + again.blocks[1][4:6]]
    kv.check([again])


def test_it_waits_for_the_last_block_that_both_have_and_hears_of_it_once():
    kv = manager()
    first = start(kv, ids(*range(40)), compute=False)
    second = SequenceBlocks(ROOT, True)
    kv.hash_known(second, ids(*range(30), 1, 1, 1))
    hits = kv.find_prefix(second, 33)
    assert hits.waits_for == first.hashes[6] and hits.blocks == [[]]  # tokens 28 to 31 differ
    for done in (2, 6):
        kv.register(first, done)
        assert kv.take_resolved() == []
    kv.register(first, 7)
    assert kv.take_resolved() == [first.hashes[6]] and kv.take_resolved() == []
    assert kv.find_prefix(second, 33).num_blocks == 7
    kv.check([first])
    kv.remove_pending(first)
    assert kv.take_resolved() == []


def test_one_that_stops_computing_resolves_what_others_waited_for():
    kv = manager()
    first = start(kv, ids(*range(40)), compute=False)
    second = SequenceBlocks(ROOT, True)
    kv.hash_known(second, ids(*range(40)))
    waits_for = kv.find_prefix(second, 40).waits_for
    assert waits_for == first.hashes[8]  # the tenth block holds the last token, which is computed anyway
    kv.register(first, 3)
    kv.remove_pending(first)
    kv.free(first)
    assert kv.take_resolved() == [waits_for]
    assert kv.find_prefix(second, 40).num_blocks == 3
    kv.check([])


def test_while_another_still_computes_a_block_it_is_pending():
    kv = manager()
    both = [start(kv, ids(*range(12)), slot, compute=False, may_hit=False) for slot in range(2)]
    third = SequenceBlocks(ROOT, True)
    kv.hash_known(third, ids(*range(13)))
    assert kv.find_prefix(third, 13).waits_for == both[0].hashes[2]
    kv.remove_pending(both[0])
    assert kv.take_resolved() == [] and kv.find_prefix(third, 13).waits_for == both[0].hashes[2]
    kv.check(both)
    kv.remove_pending(both[1])
    assert kv.take_resolved() == [both[0].hashes[2]]


def test_a_prompt_is_hashed_in_parts():
    kv = manager()
    tokens = ids(*range(48))
    whole, parts = SequenceBlocks(ROOT, True), SequenceBlocks(ROOT, True)
    kv.hash_known(whole, tokens)
    counts = []
    while not kv.is_hashed(parts, len(tokens)):
        counts.append(kv.hash_waiting(parts, tokens, 5))
    assert parts.hashes == whole.hashes and len(counts) == 3 and sum(counts) == 11  # the first costs nothing
    uncached = SequenceBlocks(ROOT, False)
    assert kv.hash_waiting(uncached, tokens, 5) == 0 and kv.is_hashed(uncached, 48) and not uncached.hashes
