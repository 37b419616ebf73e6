"""Places: what decides about each place of a row's window: the grammar, the reasoning before it, or what ends it. No I/O.

Place p samples the token behind the row's first p drafts. A copy of the reasoning follows the drafts, and the grammar's matcher
is given those that are the grammar's (window_masks.py). A window may always end before a place: the row's next step begins
there, and decides about it as if there were no drafts. So whatever is rare ends the window:

    ANY       reasoning: any token, without a mask
    FORCED    the budget of reasoning is spent: only the next token of its end
    GRAMMAR   what the matcher allows; `opening` may begin the reasoning instead
    NOTHING   behind the model's own end, behind an id that is no token, and where a grammar begins anew
"""

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from quire.enginecore.grammar.matchers import Reasoning, follow


class Kind(IntEnum):
    ANY = 0
    FORCED = 1
    GRAMMAR = 2
    NOTHING = 3


class Place(NamedTuple):
    number: int
    kind: Kind
    token: int | None = None  # FORCED: the only one. GRAMMAR: one that may begin the reasoning


def places_of(
    reasoning: Reasoning | None, drafts: list[int], ends: Collection[int], vocab_size: int
) -> tuple[list[Place], list[int]]:
    """The places of a window that have masks, in order; and the drafts that the matcher takes, one less than GRAMMAR places.

    ends: ids that end an output, which no matcher is given. reasoning: None if it is over; it is changed."""
    places: list[Place] = []
    taken: list[int] = []  # by the matcher
    num_states = 0  # of the matcher that have a place
    may_follow = True
    for number in range(len(drafts) + 1):
        is_grammars = reasoning is None or reasoning.opening is not None
        if not may_follow or (is_grammars and len(taken) != num_states):
            places.append(Place(number, Kind.NOTHING))
            break
        if is_grammars:
            places.append(Place(number, Kind.GRAMMAR, reasoning.opening if reasoning is not None else None))
            num_states += 1
        elif reasoning is not None and reasoning.forced is not None:
            places.append(Place(number, Kind.FORCED, reasoning.forced))
        if number < len(drafts):
            reasoning, is_taken = follow(reasoning, draft := drafts[number])
            if is_taken:
                may_follow = draft not in ends and 0 <= draft < vocab_size
                taken.append(draft)
    return places, taken[: max(num_states - 1, 0)]
