"""All orders in which the launches of several ranks may exchange rows: the kernels' own loads and stores, in a model of memory.

The interpreter says which places a program stores into, empties and waits for. In the model a rank's stores into its peers'
places arrive at any time and in any order, even when its launch is over; its own places are empty no sooner than at the end of
the launch that empties them. Turns count from the slowest rank's, so there are finitely many states, and all are looked at.
Each row has places and a turn of its own (which is looked at, too): one row stands for all, and for launches of any of them.
"""

import pytest
import torch
from exchange_cases import EPS, ends, inputs

pytestmark = pytest.mark.interpret

H, TURNS = 16, 3


def traced(monkeypatch, rank, turn, rows, ends):
    """What a launch's programs do with places, row after row: ("send" | "empty" | "wait", (whose, which turn's, which))."""
    from triton.runtime import interpreter

    from quire.kernels.exchange.all_reduce_norm import EMPTY, all_reduce_norm

    done = []

    def look(pointers, words):
        for owner, end in enumerate(ends):
            at, within = divmod(int(pointers.data.flat[0]) - end.places.data_ptr(), 4 * H)
            if 0 <= at < end.places.numel() // H:
                assert not within and pointers.data.size == H
                kind = "wait" if words is None else "empty" if (words.data == EMPTY[4]).all() else "send"
                assert (owner == rank) == (kind != "send")
                done.append((kind, (owner, *divmod(at, end.places[0].numel() // H))))

    def store(self, pointers, words, *rest):
        look(pointers, words)
        return masked_store(self, pointers, words, *rest)

    def load(self, pointers, *rest):
        look(pointers, None)
        return masked_load(self, pointers, *rest)

    builder = interpreter.InterpreterBuilder
    masked_store, masked_load = builder.create_masked_store, builder.create_masked_load
    ends[rank].places.fill_(1)  # nothing is waited for
    ends[rank].turns.fill_(turn)
    (x, *_), residual, weight = inputs(len(ends), rows, H, 1, torch.float32, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_store", store)
        patch.setattr(builder, "create_masked_load", load)
        all_reduce_norm(x, residual, weight, EPS, ends[rank])
    return done


def programs_of(monkeypatch, size, two_shot):
    """[rank][turn] of the first row; no other row touches its places."""
    made = ends(size, 2 * size, H, torch.float32, "cpu", two_shot)
    for rank in range(size):
        one, all_rows = (traced(monkeypatch, rank, 0, rows, made) for rows in (1, size + 1))
        others = all_rows[len(one) :]
        assert all_rows[: len(one)] == one and not {place for _, place in one} & {place for _, place in others}
    return [[traced(monkeypatch, rank, turn, 1, made) for turn in range(TURNS)] for rank in range(size)]


class Broken(Exception):
    pass


def look_at_all(programs):
    """How many states there are. Raises Broken.

    A state: the slowest rank's turn, as far as programs depend on it; of each rank its turn, from there, and how far it is in
    its program; which place holds a row of which turn; which stores, likewise, have not arrived.
    """
    begin = advanced(programs, 0, [(0, 0)] * len(programs), {}, set())
    seen, left = {begin}, [begin]
    while left:
        following = set(successors(programs, *left.pop()))
        if not following:
            raise Broken("all wait for ever")
        left += following - seen
        seen |= following
    return len(seen)


def of_turn(program, turn):
    return program[turn % len(program)]


def successors(programs, base, ranks, held, under_way):
    """A store arrives, or a launch ends and the next begins."""
    held = dict(held)
    for place, turn in under_way:
        if place in held:
            raise Broken("a store into a place that is not empty")
        yield advanced(programs, base, ranks, {**held, place: turn}, under_way - {(place, turn)})
    for rank, (turn, at) in enumerate(ranks):
        ops = of_turn(programs[rank], base + turn)
        if at == len(ops):
            emptied = {place for kind, place in ops if kind == "empty"}
            if any(held.get(place, turn) > turn for place in emptied):
                raise Broken("emptied before it is read")
            kept = {place: turn for place, turn in held.items() if place not in emptied}
            yield advanced(programs, base, [*ranks[:rank], (turn + 1, 0), *ranks[rank + 1 :]], kept, under_way)


def advanced(programs, base, ranks, held, under_way):
    """The state, once each program has come as far as it can without the others."""
    ranks, under_way = list(ranks), set(under_way)
    for rank, (turn, at) in enumerate(ranks):
        for kind, place in of_turn(programs[rank], base + turn)[at:]:
            if kind == "wait" and place not in held:
                break
            if kind == "wait" and held[place] != turn:
                raise Broken("what is read is not of this turn")
            if kind == "send":
                under_way.add((place, turn))
            at += 1
        ranks[rank] = turn, at
    slowest = min(turn for turn, _ in ranks)
    ahead = tuple((turn - slowest, at) for turn, at in ranks)
    rows, stores = (frozenset((place, turn - slowest) for place, turn in some) for some in (held.items(), under_way))
    return (base + slowest) % len(programs[0]), ahead, rows, stores


@pytest.mark.parametrize(("size", "two_shot"), [(2, False), (3, False), (2, True), (4, True)])
def test_no_order_loses_or_mixes_up_a_row_or_waits_for_ever(size, two_shot, monkeypatch):
    assert look_at_all(programs_of(monkeypatch, size, two_shot)) > 20


def split(program, kind):
    """(the others, those of the kind) of each turn."""
    others = [[op for op in ops if op[0] != kind] for ops in program]
    return others, [[op for op in ops if op[0] == kind] for ops in program]


def never(program, kind):
    return split(program, kind)[0]


def a_turn_late(program, kind):
    others, those = split(program, kind)
    return [others[turn] + those[turn - 1] for turn in range(TURNS)]


def in_two_places(program):
    def moved(turn, kind, place):
        owner, _, which = place
        return kind, (owner, (turn - (kind == "empty")) % 2, which)

    return [[moved(turn, *op) for op in of_turn(program, turn)] for turn in range(2 * TURNS)]


FAULTS = {
    "never emptied": lambda program: never(program, "empty"),
    "emptied a turn late": lambda program: a_turn_late(program, "empty"),
    "not waited for": lambda program: never(program, "wait"),
    "two places": in_two_places,
}


@pytest.mark.parametrize("two_shot", [False, True])
def test_faults_are_seen(two_shot, monkeypatch):
    programs = programs_of(monkeypatch, 2, two_shot)
    for fault in FAULTS.values():
        with pytest.raises(Broken):
            look_at_all([fault(program) for program in programs])
    with pytest.raises(Broken, match="all wait for ever"):
        look_at_all([never(programs[0], "send"), *programs[1:]])
