"""Deadlines: each is told once, and those of requests that have ended are forgotten."""

from quire.enginecore.tenants.deadlines import COMPACT_AT, Deadlines


def test_what_is_overdue_is_told_once_and_what_has_ended_never():
    running = {(1, 7), (1, 8), (2, 7)}
    deadlines = Deadlines(lambda owner, request_id: (owner, request_id) in running)
    for owner, request_id, deadline in ((1, 8, 12.0), (1, 7, 11.0), (2, 7, 10.5), (3, 9, 10.0)):
        deadlines.add(owner, request_id, deadline)
    assert deadlines.overdue(9.0) == [] and deadlines.overdue(11.0) == [(2, 7), (1, 7)]
    assert deadlines.overdue(11.9) == []
    running.clear()
    assert deadlines.overdue(99.0) == [] and not len(deadlines)


def test_requests_that_have_ended_take_no_memory():
    deadlines = Deadlines(lambda owner, request_id: request_id >= 100_000 - 10)
    for request_id in range(100_000):
        deadlines.add(1, request_id, 1e9 - request_id)
    assert len(deadlines) <= COMPACT_AT + 10
    assert len(deadlines.overdue(2e9)) == 10
