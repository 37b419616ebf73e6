"""The router's memory: hashes of prompts, and which engine was sent which blocks; that none of it grows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_prompts import SIZE, array, blocks

from quire.frontend.replicas.router_index import MAX_TOKENS, NUM_HOLDERS, NUM_WAYS, BlockIndex, PrefixHasher

tokens = st.lists(st.integers(0, 3), max_size=24)


# -------------------------------------------------------------------------------------------------------------- hashes
HASHER = PrefixHasher(SIZE)


@given(tokens, tokens, st.sampled_from([b"", b"a"]), st.sampled_from([b"", b"a"]))
def test_hashes_are_equal_as_far_as_prompts_and_salts_are(one, other, salt, other_salt):
    hashes, others = HASHER.hashes(array(one), salt), HASHER.hashes(array(other), other_salt)
    assert (len(hashes), len(others)) == (len(one) // SIZE, len(other) // SIZE)
    for i, (h, o) in enumerate(zip(hashes, others, strict=False), 1):
        assert (h == o) == (one[: i * SIZE] == other[: i * SIZE] and salt == other_salt)
    assert len({*hashes.tolist()}) == len(hashes)


def test_parts_of_a_salt_are_told_apart():
    prompt = blocks(1)
    found = {HASHER.hashes(prompt, *parts).tobytes() for parts in [(), (b"",), (b"ab",), (b"a", b"b"), (b"", b"ab")]}
    assert len(found) == 5


def test_another_process_has_other_hashes():
    assert PrefixHasher(SIZE).hashes(blocks(1)).tobytes() != PrefixHasher(SIZE).hashes(blocks(1)).tobytes()


def test_a_prompt_without_end_is_hashed_to_a_limit():
    assert len(HASHER.hashes(np.zeros(MAX_TOKENS + 100, np.int32))) == MAX_TOKENS // SIZE


# --------------------------------------------------------------------------------------------------------------- index
def depths(index: BlockIndex, hashes: np.ndarray) -> dict[int, int]:
    return dict(zip(*index.depths(index.look_up(hashes)), strict=True))


def add(index: BlockIndex, engine: int, hashes: np.ndarray) -> None:
    index.add(engine, index.look_up(hashes), depths(index, hashes).get(engine, 0))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, NUM_HOLDERS - 1), tokens), max_size=30), tokens)
def test_an_index_with_room_knows_how_much_of_a_prompt_each_engine_was_sent(history, prompt):
    """No more engines than are remembered of a block, so that none is forgotten."""
    index, sent = BlockIndex(NUM_HOLDERS, 4096), {}
    for engine, ids in history:
        add(index, engine, HASHER.hashes(array(ids)))
        for end in range(SIZE, len(ids) + 1, SIZE):
            sent.setdefault(engine, set()).add(tuple(ids[:end]))
    ends = range(SIZE, len(prompt) + 1, SIZE)
    expected = {e: max((end // SIZE for end in ends if tuple(prompt[:end]) in known), default=0) for e, known in sent.items()}
    assert depths(index, HASHER.hashes(array(prompt))) == {e: depth for e, depth in expected.items() if depth}


def test_of_many_holders_those_who_have_computed_most_since_are_forgotten():
    index, hashes = BlockIndex(NUM_HOLDERS + 1, 4096), HASHER.hashes(blocks(3))
    for engine in range(NUM_HOLDERS):
        add(index, engine, hashes)
    add(index, 2, HASHER.hashes(blocks(5, seed=1)))
    add(index, NUM_HOLDERS, hashes)
    assert depths(index, hashes) == dict.fromkeys({*range(NUM_HOLDERS + 1)} - {2}, 3)


def test_a_beginning_that_everybody_was_sent_is_counted_by_its_end():
    """Of the shared blocks engine 0 is forgotten; that it has what follows says that it has them."""
    index, shared = BlockIndex(NUM_HOLDERS + 1, 4096), blocks(3)
    whole = HASHER.hashes(np.concatenate([shared, blocks(2, seed=1)]))
    add(index, 0, whole)
    for engine in range(1, NUM_HOLDERS + 1):
        add(index, engine, HASHER.hashes(shared))
    assert depths(index, whole)[0] == 5


def test_an_index_is_bounded_and_forgets_what_was_not_used_for_long():
    index, kept = BlockIndex(2, 1024), HASHER.hashes(blocks(2))
    sizes = [a.nbytes for a in vars(index).values() if isinstance(a, np.ndarray)]
    first = HASHER.hashes(blocks(64, seed=1))
    add(index, 0, first)
    for seed in range(2, 200):
        add(index, 1, HASHER.hashes(blocks(64, seed=seed)))
        add(index, 0, kept)
    assert depths(index, kept) == {0: 2} and depths(index, first) == {}
    assert [a.nbytes for a in vars(index).values() if isinstance(a, np.ndarray)] == sizes
    assert len(index._hashes) == 1024 and 1024 % NUM_WAYS == 0


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_one_prompt_do_not_take_each_others_places(seed):
    """There are eight places for all, and one block is there already, in one of them."""
    index, first, others = BlockIndex(1, NUM_WAYS), blocks(1, seed=seed), blocks(NUM_WAYS - 1, seed=seed + 9)
    add(index, 0, HASHER.hashes(first))
    hashes = HASHER.hashes(np.concatenate([first, others]))
    add(index, 0, hashes)
    assert set(hashes.tolist()) == set(index._hashes.tolist())


def test_a_block_that_is_there_keeps_its_place_when_more_of_its_prompt_come():
    """Though it was the one used least recently of its eight places, which are all taken."""
    index, hashes = BlockIndex(1, NUM_WAYS), [HASHER.hashes(blocks(1, seed=seed)) for seed in range(NUM_WAYS)]
    for one in hashes:
        add(index, 0, one)
    assert set(index._hashes.tolist()) == {int(one[0]) for one in hashes}
    longer = HASHER.hashes(blocks(3, seed=0))
    assert longer[0] == hashes[0][0]
    add(index, 0, longer)
    assert set(longer.tolist()) < set(index._hashes.tolist())


def test_blocks_are_believed_gone_once_others_have_filled_the_cache():
    index = BlockIndex(2, 4096)
    index.set_capacity(0, 10)
    first, *more = (HASHER.hashes(blocks(4, seed=seed)) for seed in range(5))
    add(index, 1, first)
    add(index, 0, first)
    add(index, 0, more[0])
    add(index, 0, first)  # used, and not computed again
    add(index, 0, more[1])
    add(index, 0, more[2])
    assert depths(index, first) == {0: 4, 1: 4} and depths(index, more[0]) == {0: 4}
    add(index, 0, more[3])
    assert depths(index, first) == {1: 4} and depths(index, more[0]) == {} and depths(index, more[2]) == {0: 4}


@pytest.mark.parametrize("capacity", [None, 10])
def test_an_engine_that_was_started_anew_holds_nothing(capacity):
    index, hashes = BlockIndex(2, 4096), HASHER.hashes(blocks(4))
    if capacity is not None:
        index.set_capacity(0, capacity)
    add(index, 0, hashes)
    add(index, 1, hashes)
    index.forget(0)
    assert depths(index, hashes) == {1: 4}
    add(index, 0, hashes)
    assert depths(index, hashes) == {0: 4, 1: 4}


def test_what_an_engine_refuses_is_taken_back_and_what_it_had_before_is_not():
    index, long = BlockIndex(3, 4096), blocks(6)
    begin, whole = HASHER.hashes(long[: 2 * SIZE]), HASHER.hashes(long)
    add(index, 0, begin)
    add(index, 1, whole)
    found = index.look_up(whole)
    index.add(0, found, 2)
    assert depths(index, whole) == {0: 6, 1: 6}
    index.take_back(0, found, 2)
    assert depths(index, whole) == {0: 2, 1: 6}
    nothing = index.look_up(HASHER.hashes(blocks(0)))
    index.add(2, nothing, 0)
    index.take_back(2, nothing, 0)
    assert depths(index, whole) == {0: 2, 1: 6}


def test_what_has_taken_the_place_of_a_refused_prompt_stays():
    index, refused, later = BlockIndex(1, 8), HASHER.hashes(blocks(8)), HASHER.hashes(blocks(8, seed=1))
    found = index.look_up(refused)
    index.add(0, found, 0)
    add(index, 0, later)
    index.take_back(0, found, 0)
    assert depths(index, later) == {0: 8} and depths(index, refused) == {}


def test_refusals_make_nobody_forget():
    """An engine of 10 blocks has refused 1000; what it took beside them is new to it, whenever that was."""
    index, kept, later = BlockIndex(2, 1 << 16), HASHER.hashes(blocks(4)), HASHER.hashes(blocks(4, seed=1))
    index.set_capacity(0, 10)
    add(index, 0, kept)
    refused = [index.look_up(HASHER.hashes(blocks(10, seed=seed))) for seed in range(2, 102)]
    for found in refused:
        index.add(0, found, 0)
    add(index, 0, later)
    for found in refused:
        index.take_back(0, found, 0)
    assert depths(index, kept) == depths(index, later) == {0: 4}
    assert all(depths(index, found.hashes) == {} for found in refused)
    add(index, 0, HASHER.hashes(blocks(5, seed=200)))
    assert depths(index, kept) == depths(index, later) == {0: 4}
    add(index, 0, HASHER.hashes(blocks(1, seed=201)))
    assert depths(index, kept) == {} and depths(index, later) == {0: 4}
    index.forget(0)
    assert depths(index, kept) == depths(index, later) == {}


def test_of_many_holders_one_that_is_of_later_than_now_stays():
    index, hashes = BlockIndex(NUM_HOLDERS + 1, 4096), HASHER.hashes(blocks(3))
    refused = index.look_up(HASHER.hashes(blocks(50, seed=1)))
    index.add(2, refused, 0)
    for engine in range(NUM_HOLDERS):
        add(index, engine, hashes)
    index.take_back(2, refused, 0)
    add(index, NUM_HOLDERS, hashes)
    assert 2 in depths(index, hashes)
