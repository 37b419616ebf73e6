"""The router as lists of calls: which engine a prompt goes to, what is remembered of it, and that nothing of it grows."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.router import POLICIES, ROW_TOKENS, Choice, Router
from quire.frontend.router_index import MAX_TOKENS, NUM_HOLDERS, NUM_WAYS, BlockIndex, PrefixHasher

SIZE = 4  # tokens of a block
tokens = st.lists(st.integers(0, 3), max_size=24)


def array(ids) -> np.ndarray:
    return np.array(ids, np.int32)


def blocks(count: int, seed: int = 0) -> np.ndarray:
    """A prompt of so many blocks."""
    return np.random.default_rng(seed).integers(0, 1000, count * SIZE).astype(np.int32)


def router(num_engines: int, policy="cache-aware", **options) -> Router:
    return Router(num_engines, policy, block_size=SIZE, max_blocks=4096, seed=0, **options)


def finish(one: Router, choice: Choice | None) -> Choice:
    assert choice is not None
    one.computed(choice.engine, choice.num_uncached)
    one.ended(choice.engine, 1)
    return choice


def is_idle(one: Router) -> bool:
    return all(work == 0 for work in one.work)


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


# ------------------------------------------------------------------------------------------------------------- choices
def test_round_robin_takes_turns_among_those_that_are_there():
    one = router(3, "round-robin")
    assert [one.send(blocks(1)).engine for _ in range(4)] == [0, 1, 2, 0]
    one.set_available(1, False)
    assert [one.send(blocks(1)).engine for _ in range(3)] == [2, 0, 2]
    one.set_available(1, True)
    assert [one.send(blocks(1), refused={0}).engine for _ in range(3)] == [1, 2, 1]


def test_least_loaded_takes_who_has_least_to_do():
    one = router(3, "least-loaded")
    sent = [one.send(blocks(n)) for n in (5, 3, 1)]
    assert sorted(choice.engine for choice in sent) == [0, 1, 2]
    assert one.send(blocks(1)).engine == sent[2].engine
    finish(one, sent[0])
    assert one.send(blocks(1)).engine == sent[0].engine


def test_ties_are_broken_by_chance():
    one = router(4, "least-loaded")
    first = [one.send(blocks(1)).engine for _ in range(4)]
    assert sorted(first) == [0, 1, 2, 3]
    assert len({Router(4, "cache-aware", seed=seed).send(blocks(1)).engine for seed in range(40)}) == 4


def test_the_next_turn_of_a_conversation_goes_where_the_last_one_was():
    one = router(50)
    said = blocks(20)
    first = finish(one, one.send(said, b""))
    assert first.num_uncached == len(said)
    for turn in range(1, 5):
        said = np.concatenate([said, blocks(2, seed=turn)])
        choice = finish(one, one.send(said, b""))
        assert choice[:2] == (first.engine, 2 * SIZE)
    assert one.send(said, b"another's salt").num_uncached == len(said)


def test_a_lost_engine_holds_nothing_when_it_is_back():
    one, said = router(2), blocks(10)
    first = finish(one, one.send(said))
    assert one.send(said, only=first.engine).num_uncached == 0
    one.lost(first.engine)
    assert one.send(said, only=first.engine).num_uncached == len(said)


def test_a_prompt_that_is_computed_whatever_is_cached_goes_to_who_has_time():
    one, said = router(2), blocks(100)
    first = finish(one, one.send(said))
    one.work[first.engine] = 1
    choice = one.send(said, may_hit=False)
    assert choice.engine != first.engine and choice.num_uncached == len(said)


def test_a_search_stays_where_it_is_if_it_can():
    one = router(8)
    one.work[3] = 1_000_000
    assert one.send(blocks(2), only=3).engine == 3
    assert one.send(blocks(2), only=3, refused={3}).engine != 3
    one.set_available(3, False)
    assert one.send(blocks(2), only=3).engine != 3


def test_what_waits_at_an_engine_is_weighed_against_what_it_knows():
    one, said = router(2), blocks(100)
    first = finish(one, one.send(said))
    one.work[first.engine] = 2 * 100 * SIZE - 1
    assert one.send(said).engine == first.engine
    one.work[first.engine] = 2 * 100 * SIZE + 1
    assert one.send(said).engine != first.engine


@pytest.mark.parametrize("num_engines", [2, 8])
def test_of_few_engines_the_idle_one_is_never_missed(num_engines):
    one = router(num_engines)
    busy = [one.send(array([1, 2, 3]), only=engine) for engine in range(num_engines - 1)]
    assert None not in busy
    for _ in range(3000):
        assert finish(one, one.send(array([1, 2, 3]))).engine == num_engines - 1


def test_a_beginning_that_all_share_does_not_make_one_engine_hot():
    one, shared = router(16), blocks(50)
    counts = [0] * 16
    for seed in range(400):
        choice = one.send(np.concatenate([shared, blocks(2, seed=seed + 1)]))
        one.computed(choice.engine, choice.num_uncached)
        counts[choice.engine] += 1
    assert max(counts) < 1.5 * min(counts)


def test_prompts_that_begin_alike_do_not_share_a_few_caches():
    """Nobody has anything to do, so that only caches matter: each engine holds 100 blocks, a prompt has 50."""
    one, shared, counts = router(20), blocks(1), [0] * 20
    for engine in range(20):
        one.set_capacity(engine, 100)
    for seed in range(200):
        counts[finish(one, one.send(np.concatenate([shared, blocks(49, seed=seed + 1)]))).engine] += 1
    assert min(counts) >= 3 and max(counts) <= 20
    one.lost(0)
    assert one._mean_filled == pytest.approx(sum(one._filled) / 20)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_has_refused_a_prompt_is_no_holder_of_it(policy):
    one, said = router(30, policy), blocks(20)
    for _ in range(30):
        choice = one.send(said, num_rows=3)
        assert choice.num_uncached == len(said)  # whoever it is
        one.refused(choice, 3)
    assert is_idle(one) and one._mean_filled == pytest.approx(0) and not any(one._filled)
    taken = one.send(said)
    if policy == "cache-aware":
        assert one.send(said)[:2] == (taken.engine, 0)


def test_holders_that_are_away_or_have_refused_are_passed_over():
    one, said = router(30), blocks(20)
    first = one.send(said)
    assert one.send(said, refused={first.engine}).engine != first.engine
    second = router(30)
    holder = second.send(said).engine
    second.set_available(holder, False)
    assert second.send(said).engine != holder


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nobody_is_left_there_is_no_choice(policy):
    one = router(2, policy)
    assert one.send(blocks(1), refused={0, 1}) is None
    one.set_available(0, False)
    assert one.send(blocks(1), refused={1}) is None and one.send(blocks(1)).engine == 1
    one.set_available(1, False)
    assert one.send(blocks(1)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_shorter_than_a_block_goes_somewhere(policy):
    one = router(3, policy)
    assert one.send(array([1])).num_uncached == 1 and one.send(np.zeros(0, np.int32)) is not None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(POLICIES), st.integers(1, 12))
def test_any_history_of_requests_leaves_no_work_behind(seed, policy, num_engines):
    chance, one, running = random.Random(seed), router(num_engines, policy), []
    for _ in range(60):
        match chance.randrange(6):
            case 0 | 1 | 2:
                rows = chance.randint(1, 3)
                refused = {e for e in range(num_engines) if chance.random() < 0.2}
                choice = one.send(blocks(chance.randint(0, 6), chance.randrange(4)), num_rows=rows, refused=refused)
                if choice is None:
                    assert all(e in refused or not one._is_available[e] for e in range(num_engines))
                else:
                    assert choice.engine not in refused and one._is_available[choice.engine]
                    running.append([choice, choice.num_uncached, rows])
            case 3 if running:
                sent = chance.choice(running)
                one.computed(sent[0].engine, sent[1])
                sent[1] = 0
            case 4 if running:
                choice, uncached, rows = running.pop(chance.randrange(len(running)))
                if uncached == choice.num_uncached and chance.random() < 0.5:
                    one.refused(choice, rows)
                else:
                    one.computed(choice.engine, uncached)
                    one.ended(choice.engine, rows)
            case 5:
                engine = chance.randrange(num_engines)
                one.set_available(engine, chance.random() < 0.7)
                if chance.random() < 0.3:
                    one.lost(engine)
                    running = [sent for sent in running if sent[0].engine != engine]
        expected = [sum(u + r * ROW_TOKENS for c, u, r in running if c.engine == engine) for engine in range(num_engines)]
        assert one.work == expected
    assert is_idle(one) == (not running)
