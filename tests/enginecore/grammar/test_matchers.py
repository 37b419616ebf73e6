"""Constraints: reasoning and its budget, ends, and masks that other parameters restrict."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.grammar.matchers import Constraint, Reasoning, restrict, stop_bits
from quire.ipc.step.sections import INT32_MAX


def constraint(reasoning: Reasoning | None, matcher: object = None) -> Constraint:
    return Constraint(matcher, 0, reasoning, stop_bits([]), stop_bits([]), frozenset())  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=30))
def test_reasoning_ends_with_the_first_occurrence_of_its_end(ends, tokens):
    reasoning = Reasoning(ends, None)
    ended = None
    for i, token in enumerate(tokens):
        reasoning.push(token)
        if reasoning.ended:
            ended = i
            break
    n = len(ends)
    first = next((i for i in range(n - 1, len(tokens)) if tokens[i - n + 1 : i + 1] == ends), None)
    assert ended == first
    assert Reasoning(ends, None).ends_in(tokens) == (first is not None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 12))
def test_a_spent_budget_forces_the_shortest_way_to_the_end(ends, tokens, budget):
    reasoning = Reasoning(ends, budget)
    for token in itertools.chain(tokens, itertools.repeat(9)):
        if reasoning.num_tokens >= budget:
            break
        reasoning.push(token)
        if reasoning.ended:
            return
        assert reasoning.num_tokens >= budget or reasoning.forced is None
    for _ in range(len(ends)):
        assert reasoning.forced is not None
        reasoning.push(reasoning.forced)
        if reasoning.ended:
            break
    assert reasoning.ended and reasoning.num_tokens <= budget + len(ends)


def test_rows_need_masks_from_the_first_token_that_may_be_bounded():
    assert constraint(None, "matcher").mask_from(10) == 0
    assert constraint(Reasoning([5], 7), "matcher").mask_from(10) == 0  # it may end before
    assert constraint(Reasoning([5], 7)).mask_from(10) == 17
    assert constraint(Reasoning([5], None)).mask_from(10) == INT32_MAX
    assert constraint(Reasoning([5], 2**31 - 1)).mask_from(10) == INT32_MAX


def test_a_matcher_gets_only_tokens_after_reasoning():
    c = constraint(Reasoning([5, 6], None), "matcher")
    assert [c.take(token) for token in (1, 5, 6, 7, 8)] == [False, False, False, True, True]
    assert c.unconsumed == [7, 8] and c.reasoning is None


def test_stop_ids_become_bits():
    words, bits = stop_bits([0, 31, 32, 100, 1])
    mask = np.zeros(4, np.uint32)
    mask[words] |= bits
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [0, 1, 31, 32, 100]


@pytest.mark.parametrize(
    ("allowed", "banned", "left"), [(None, [], {1, 40}), ([40, 2], [], {40}), (None, [1, 40], set()), ([1], [1], set())]
)
def test_what_other_parameters_forbid_is_taken_out(allowed, banned, left):
    def words(ids) -> np.ndarray:
        made = np.zeros(2, np.uint32)
        made[stop_bits(ids).words] = stop_bits(ids).bits
        return made

    mask = words([1, 40])
    assert restrict(mask, None if allowed is None else words(allowed), banned) == bool(left)
    assert set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()) == left


@pytest.mark.parametrize(
    ("tokens", "begun", "missing"),
    [([7], True, False), ([1, 7], True, False), ([1, 1, 7], True, False), ([1, 1, 1], False, True), ([1, 1], False, False)],
)
def test_reasoning_begins_with_its_start_or_not_at_all(tokens, begun, missing):
    reasoning = Reasoning([9], 0, [7], 2)
    for token in tokens:
        assert reasoning.forced is None and reasoning.opening is None and not reasoning.is_missing
        reasoning.push(token)
    assert (reasoning.has_begun, reasoning.is_missing) == (begun, missing)
    assert reasoning.forced == (9 if begun else None) and reasoning.num_tokens == 0


def test_a_start_of_several_tokens_is_met_token_by_token():
    reasoning = Reasoning([9], 1, [7, 8], 2)
    for token in (7, 7, 8, 1):
        assert reasoning.forced is None
        reasoning.push(token)
    assert reasoning.forced == 9


def test_the_first_token_decides_between_reasoning_and_the_grammar():
    c = constraint(Reasoning([9], None, [7]), "matcher")
    assert c.reasoning.opening == 7
    assert c.take(5) and c.reasoning is None and c.unconsumed == [5]
    c = constraint(Reasoning([9], None, [7]), "matcher")
    assert not c.take(7) and c.reasoning.opening is None
    assert [c.take(token) for token in (5, 9, 6)] == [False, False, True] and c.unconsumed == [6]
