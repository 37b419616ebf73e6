"""The router as lists of calls: which engine a prompt goes to."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_prompts import SIZE, array, blocks

from quire.frontend.replicas.router import POLICIES, ROW_TOKENS, Choice, Router


def router(num_engines: int, policy="cache-aware", **options) -> Router:
    return Router(num_engines, policy, block_size=SIZE, max_blocks=4096, seed=0, **options)


def finish(one: Router, choice: Choice | None) -> Choice:
    assert choice is not None
    one.computed(choice.engine, choice.num_uncached)
    one.ended(choice.engine, 1)
    return choice


def is_idle(one: Router) -> bool:
    return all(work == 0 for work in one.work)


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
