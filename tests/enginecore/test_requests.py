"""Requests in the core: deadlines, what a tenant may have, and what waits while the workers are away."""

import dataclasses
import time

import msgspec
import pytest
from core_by_hand import MAX_NUM_SEQS, add

from quire.enginecore.tenants.backlog import QueueBounds
from quire.ipc.messages.frontend import RequestError, StepOutputs, Tenant


def ask(request_id, *, tenant=None, timeout_s=0.0, is_bounded=False, **params):
    message = add(request_id, **{"max_tokens": 50, "ignore_eos": True, **params})
    return msgspec.structs.replace(message, tenant=tenant, timeout_s=timeout_s, is_bounded=is_bounded)


def test_a_request_ends_when_its_deadline_comes_while_it_runs_and_while_it_waits(by_hand):
    core, frontend = by_hand.core, by_hand.frontend()
    now = [100.0]
    core.requests.clock = lambda: now[0]
    for request_id in range(1, MAX_NUM_SEQS + 3):
        frontend.send(ask(request_id, timeout_s=5.0 if request_id in (1, MAX_NUM_SEQS + 1) else 0.0))
    by_hand.until(lambda: core.scheduler.num_running == MAX_NUM_SEQS and len(core.scheduler.waiting) == 2)
    now[0] += 4.9
    by_hand.turn()
    assert core.scheduler.num_running + len(core.scheduler.waiting) == MAX_NUM_SEQS + 2
    now[0] += 0.2
    errors = [by_hand.answer(frontend, RequestError) for _ in range(2)]
    assert [e.id for e in errors] == [1, MAX_NUM_SEQS + 1] and {e.code for e in errors} == {"deadline_exceeded"}
    by_hand.until(lambda: core.scheduler.is_idle)
    assert core.scheduler.counters.generation_tokens < 50 * (MAX_NUM_SEQS + 1) + 10


def test_a_request_that_has_ended_has_no_deadline(by_hand):
    frontend = by_hand.frontend()
    frontend.send(ask(1, timeout_s=3600.0, max_tokens=2))
    while not by_hand.answer(frontend, StepOutputs).finished:
        pass
    assert by_hand.core.requests.deadlines.overdue(time.monotonic() + 1e6) == []


def test_a_key_has_its_own_limits_and_the_others_do_not_wait_for_it(by_hand):
    core, frontend = by_hand.core, by_hand.frontend()
    limited = Tenant("a", "a", max_running=1, max_waiting=2)
    for request_id in range(1, 6):
        frontend.send(ask(request_id, tenant=limited))
    refused = [by_hand.answer(frontend, RequestError) for _ in range(2)]
    assert [e.id for e in refused] == [4, 5] and {e.code for e in refused} == {"rate_limited"}
    assert all(e.retry_after_s >= 1 for e in refused)
    by_hand.until(lambda: core.scheduler.num_running == 1 and len(core.scheduler.waiting) == 2)
    frontend.send(ask(6, tenant=Tenant("b", "b"), max_tokens=1))
    while True:
        if any(end.key >> 8 == 6 for end in by_hand.answer(frontend, StepOutputs).finished):
            break
    assert core.scheduler.num_running == 1 and len(core.scheduler.waiting) == 2
    stats = core.requests.backlog.stats()
    assert [(t.label, t.num_waiting, t.num_running) for t in stats] == [("a", 2, 1)]


@pytest.mark.parametrize("is_bounded", [True, False])
def test_requests_hear_of_it_when_the_workers_stay_away(by_hand, is_bounded):
    core, frontend, now = by_hand.core, by_hand.frontend(), [100.0]
    core.requests.clock = lambda: now[0]
    core.requests.backlog.bounds = dataclasses.replace(core.requests.backlog.bounds, max_queue_s=5.0)
    by_hand.workers.is_ready = False
    by_hand.turn()
    frontend.send(ask(1, is_bounded=is_bounded))
    by_hand.until(lambda: len(core.scheduler.waiting) == 1)
    now[0] += 5.1
    if is_bounded:
        error = by_hand.answer(frontend, RequestError)
        assert (error.id, error.code) == (1, "unavailable") and error.retry_after_s >= 1
        frontend.send(ask(2, is_bounded=True))
        assert by_hand.answer(frontend, RequestError).id == 2
    else:
        by_hand.turn()
        assert len(core.scheduler.waiting) == 1
    by_hand.workers.is_ready = True
    frontend.send(ask(3, is_bounded=True, max_tokens=1))
    while not any(end.key >> 8 == 3 for end in by_hand.answer(frontend, StepOutputs).finished):
        pass


def test_the_rate_is_learnt_only_while_something_waits(by_hand):
    core, frontend = by_hand.core, by_hand.frontend()
    core.requests.backlog.bounds = QueueBounds(100, max_queue_s=5.0)
    frontend.send(ask(1))
    while not by_hand.answer(frontend, StepOutputs).finished:
        pass
    assert core.requests.backlog.rate.known_s == 0.0
    for request_id in range(2, 2 + 3 * MAX_NUM_SEQS):
        frontend.send(ask(request_id))
    by_hand.until(lambda: len(core.scheduler.waiting) > 0)
    by_hand.until(lambda: core.scheduler.is_idle)
    assert core.requests.backlog.rate.known_s > 0.0
