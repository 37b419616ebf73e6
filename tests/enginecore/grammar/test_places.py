"""Places of a window: what each may be follows from the tokens before it, as it would if these had come one by one."""

import numpy as np
import pytest

from quire.enginecore.grammar.bans import Bans
from quire.enginecore.grammar.matchers import Constraint, Reasoning, stop_bits
from quire.enginecore.grammar.places import Kind, places_of

ANY, FORCED, GRAMMAR, NOTHING = Kind
END, START, EOS = 50, 49, 7


def kinds(reasoning: Reasoning | None, drafts: list[int]) -> tuple[list[tuple[int, Kind, int | None]], list[int]]:
    places, taken = places_of(reasoning, drafts, {EOS}, 100)
    return [tuple(place) for place in places], taken


def test_a_grammar_decides_about_all_places_up_to_what_it_cannot_take():
    assert kinds(None, []) == ([(0, GRAMMAR, None)], [])
    assert kinds(None, [1, 2]) == ([(i, GRAMMAR, None) for i in range(3)], [1, 2])
    for odd in (EOS, 100, -1):
        assert kinds(None, [1, odd, 2]) == ([(0, GRAMMAR, None), (1, GRAMMAR, None), (2, NOTHING, None)], [1])


def test_reasoning_ends_within_a_window():
    assert kinds(Reasoning([END], None), [1, 2]) == ([], [])
    assert kinds(Reasoning([END], None), [1, END, 3]) == ([(2, GRAMMAR, None), (3, GRAMMAR, None)], [3])


def test_a_budget_is_spent_within_a_window():
    assert kinds(Reasoning([END], 1), [1, END, 3]) == ([(1, FORCED, END), (2, GRAMMAR, None), (3, GRAMMAR, None)], [3])
    assert kinds(Reasoning([END, 51], 2), [1, END, 51]) == ([(2, FORCED, 51), (3, GRAMMAR, None)], [])
    assert kinds(Reasoning([END], 0), [9, 9]) == ([(0, FORCED, END), (1, FORCED, END), (2, FORCED, END)], [])


def test_a_first_draft_decides_whether_there_is_reasoning():
    def undecided() -> Reasoning:
        return Reasoning([END], 9, [START])

    assert kinds(undecided(), [1, 2]) == ([(0, GRAMMAR, START), (1, GRAMMAR, None), (2, GRAMMAR, None)], [1, 2])
    assert kinds(undecided(), [START, 1, 2]) == ([(0, GRAMMAR, START)], [])
    assert kinds(undecided(), [START, END, 2]) == ([(0, GRAMMAR, START), (2, NOTHING, None)], [])  # the grammar begins anew


@pytest.mark.parametrize("seed", range(60))
def test_places_are_those_of_tokens_that_come_one_by_one(seed):
    """Up to a place of NOTHING, behind which the row's next step goes on."""
    rng = np.random.default_rng(seed)
    ends = [[END], [END, 51], [END, END, 51]][seed % 3]
    reasoning = Reasoning(ends, [None, 0, 3, 8][seed % 4], [START] if seed % 5 == 0 else [])
    constraint = Constraint(object(), 0, reasoning, stop_bits([]), stop_bits([]), frozenset([EOS]))  # type: ignore[arg-type]
    for token in rng.choice([1, 2, END, START], int(rng.integers(0, 3))).tolist():
        constraint.take(token)
    drafts = rng.choice(
        [1, 2, 3, END, END, 51, START, EOS], int(rng.integers(0, 16)), p=[0.2, 0.2, 0.1, 0.2, 0.1, 0.1, 0.08, 0.02]
    )
    copy = constraint.reasoning.copy() if constraint.reasoning is not None else None
    places, taken = places_of(copy, drafts.tolist(), {EOS}, 100)
    by_number, constraint.unconsumed = {place.number: place for place in places}, []
    end = next((place.number for place in places if place.kind is NOTHING), 99)
    for number, token in enumerate([*drafts.tolist(), None]):
        if number >= end:
            break
        now, place = constraint.reasoning, by_number.get(number)
        if now is None or now.opening is not None:
            assert place is not None and place.kind is GRAMMAR and place.token == (now.opening if now is not None else None)
            assert constraint.unconsumed == taken[: len(constraint.unconsumed)]
        elif now.forced is not None:
            assert place is not None and (place.kind, place.token) == (FORCED, now.forced)
        else:
            assert place is None
        if token is not None:
            constraint.take(token)


def test_a_copy_of_reasoning_goes_its_own_way():
    reasoning = Reasoning([END, 51], 5, [START])
    reasoning.push(START)
    reasoning.push(END)
    copy = reasoning.copy()
    copy.push(51)
    assert copy.ended and not reasoning.ended and reasoning.num_tokens == 1
    reasoning.push(51)
    assert reasoning.ended


def test_bans_count_the_drafts_before_a_place():
    bans = Bans([EOS], 6, [[3], [4, 5], [5, 6, 7]], 4, [1, 5])
    assert bans.behind([]) == [EOS, 3]
    assert bans.behind([6]) == [EOS, 3, 7]
    assert bans.behind([6, 4]) == [3, 5]
