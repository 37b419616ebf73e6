"""When something that ended is started again, and when no more."""

from quire.ipc.process.restarts import (
    LIVED_WELL_S,
    MAX_FAILED_STARTS,
    MAX_KILLED_STARTS,
    MAX_PAUSE_S,
    MAX_SHORT_LIVES,
    Restarts,
)


def test_the_pause_doubles_to_a_bound_and_is_the_shortest_after_a_good_life():
    restarts = Restarts(max_failed_starts=None, max_short_lives=None)
    restarts.ready(0.0)
    assert [restarts.ended(1.0) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S]
    restarts.ready(100.0)
    assert restarts.ended(99.0 + LIVED_WELL_S) == MAX_PAUSE_S
    restarts.ready(100.0)
    assert restarts.ended(100.0 + LIVED_WELL_S) == 1.0


def test_only_starts_that_fail_in_a_row_are_given_up():
    restarts = Restarts()
    for _ in range(3):
        restarts.ready(0.0)
        assert restarts.ended(1.0) is not None
        assert None not in [restarts.ended(1.0) for _ in range(MAX_FAILED_STARTS - 1)]
    assert restarts.ended(1.0) is None


def test_lives_that_are_short_are_given_up_when_there_were_so_many_in_a_row():
    restarts, now = Restarts(), 0.0
    for _ in range(2):
        for _ in range(MAX_SHORT_LIVES - 1):
            restarts.ready(now)
            assert restarts.ended(now + LIVED_WELL_S - 1.0) is not None
        restarts.ready(now)
        assert restarts.ended(now + LIVED_WELL_S) == 1.0
    pauses = []
    for _ in range(MAX_SHORT_LIVES):
        restarts.ready(now)
        pauses.append(restarts.ended(now + 1.0))
    assert pauses == [2.0, 4.0, 8.0, 16.0, *[MAX_PAUSE_S] * 3, None]


def test_a_first_start_at_once_and_its_failures_after_pauses():
    restarts = Restarts(first_pause_s=0.0, lived_well_s=0.0)
    for _ in range(2):
        restarts.ready(5.0)
        assert [restarts.ended(5.0) for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert restarts.ended(5.0) is None


def test_what_is_killed_while_it_starts_is_back_at_once_but_not_for_ever():
    restarts = Restarts()
    restarts.ready(0.0)
    restarts.served()
    for _ in range(2):
        assert restarts.ended(0.1) == 0.0
        assert [restarts.ended(0.2, from_outside=True) for _ in range(MAX_KILLED_STARTS)] == [0.0] * MAX_KILLED_STARTS
        restarts.ready(0.3)
        restarts.served()
    assert restarts.ended(0.1, from_outside=True) == 0.0
    assert restarts.ended(0.2) == 1.0  # it has failed by itself
    assert {restarts.ended(0.2, from_outside=True) for _ in range(MAX_KILLED_STARTS)} == {0.0}
    assert [restarts.ended(0.2, from_outside=True) for _ in range(MAX_FAILED_STARTS - 1)] == [2.0, 4.0, None]


def test_a_short_life_without_a_request_counts_whatever_ended_it():
    restarts, pauses = Restarts(), []
    for _ in range(3):
        restarts.ready(0.0)
        pauses.append(restarts.ended(0.1, from_outside=True))
    assert pauses == [1.0, 2.0, 4.0]


def test_what_has_served_is_back_at_once_and_its_failures_are_forgotten():
    restarts = Restarts()
    for _ in range(3 * MAX_SHORT_LIVES):
        restarts.ready(0.0)
        restarts.served()
        assert restarts.ended(0.1) == 0.0
        assert [restarts.ended(0.2) for _ in range(MAX_FAILED_STARTS - 1)] == [1.0, 2.0, 4.0]  # killed while it starts
    restarts.ready(0.0)
    assert restarts.ended(0.1) == 8.0  # another life, which has served nothing
