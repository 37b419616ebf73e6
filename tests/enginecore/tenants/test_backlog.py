"""Backlog: which request is refused, with which code, and when it may be sent again."""

import math

import pytest

from quire.enginecore.tenants.backlog import MOST_REPORTED, Ask, Backlog, QueueBounds, Room, TokenRate, retry_after
from quire.ipc.messages.frontend import Tenant

A, B = Tenant("a", "a"), Tenant("b", "b")
ROOM = Room(num_waiting=10)


def loaded(rate=100.0, **bounds):
    """A backlog whose engine computes so many tokens a second."""
    backlog = Backlog(QueueBounds(**{"max_num_waiting": 1000, "max_queue_s": 30.0, **bounds}))
    backlog.rate.add(2 * rate, 2.0)
    return backlog


def wait(backlog, limits, *tokens):
    """Sequences of a tenant wait that need so many tokens."""
    tenant = backlog.tenant(limits)
    for each in tokens:
        tenant.add_waiting(each // 2, each)
    return tenant


def code_of(refusal):
    return None if refusal is None else refusal.code


def test_a_rate_is_unknown_for_a_second_of_steps_and_then_follows_the_load():
    rate = TokenRate()
    for _ in range(9):
        rate.add(50, 0.1)
        assert rate.per_s is None
    rate.add(50, 0.2)
    assert rate.per_s == pytest.approx(500 / 1.1, rel=0.02)
    for _ in range(300):
        rate.add(200, 0.1)
    assert rate.per_s == pytest.approx(2000, rel=0.05)


def test_a_queue_is_bounded_by_its_time():
    backlog = loaded()
    tenant = wait(backlog, None, 2000, 1000)  # 30 s
    assert backlog.wait_s(tenant) == pytest.approx(30.0)
    assert backlog.refusal(tenant, Ask(1, 5, True), ROOM) is None
    wait(backlog, None, 600)
    refusal = backlog.refusal(tenant, Ask(1, 5, True), ROOM)
    assert refusal.code == "overloaded" and refusal.retry_after_s == 36
    assert backlog.refusal(tenant, Ask(1, 5), ROOM) is None, "a batch may wait"
    tenant.remove_waiting(300, 600)
    assert backlog.refusal(tenant, Ask(1, 5, True), ROOM) is None
    backlog.check()


def test_before_the_queues_rate_is_known_that_of_many_rows_counts():
    backlog = Backlog(QueueBounds(1000, max_queue_s=10.0))
    tenant = wait(backlog, None, 1500)
    assert backlog.wait_s(tenant) == 0.0
    backlog.rate_before.add(100, 2.0)
    assert backlog.wait_s(tenant) == pytest.approx(30.0)
    backlog.rate.add(600, 2.0)
    assert backlog.wait_s(tenant) == pytest.approx(5.0)


def test_one_large_request_is_never_too_late_behind_nothing():
    backlog = loaded()
    assert backlog.refusal(backlog.tenant(None), Ask(1, 10**6, True, 0.1), Room()) is None


def test_nothing_is_refused_for_its_time_while_the_rate_is_unknown_or_unbounded():
    unknown = Backlog(QueueBounds(1000, max_queue_s=1.0))
    assert unknown.refusal(wait(unknown, None, 10**9), Ask(1, 5, True), ROOM) is None
    unbounded = loaded(max_queue_s=0.0)
    assert unbounded.refusal(wait(unbounded, None, 10**9), Ask(1, 5, True), ROOM) is None


def test_a_tenant_waits_behind_its_share_and_not_behind_all():
    backlog = loaded()
    a, b = wait(backlog, A, *[1000] * 10), backlog.tenant(B)
    assert backlog.wait_s(a) == pytest.approx(100.0) and backlog.wait_s(b) == 0.0
    assert code_of(backlog.refusal(a, Ask(1, 5, True), ROOM)) == "overloaded"
    assert backlog.refusal(b, Ask(1, 5, True), ROOM) is None
    wait(backlog, B, 1000)
    assert backlog.wait_s(b) == pytest.approx(20.0), "half of the engine is its"
    heavy = backlog.tenant(Tenant("b", "b", weight=4.0))
    assert heavy is b and backlog.wait_s(b) == pytest.approx(12.5)


def test_one_tenant_cannot_fill_the_queue_for_the_others():
    backlog = Backlog(QueueBounds(10))
    a, b = wait(backlog, A, *[10] * 10), backlog.tenant(B)
    full = Room(num_waiting=10)
    assert code_of(backlog.refusal(a, Ask(1, 5), full)) == "overloaded"
    assert backlog.refusal(b, Ask(1, 5), full) is None
    wait(backlog, B, *[10] * 5)
    assert code_of(backlog.refusal(b, Ask(1, 5), full)) == "overloaded"
    assert code_of(backlog.refusal(b, Ask(11, 5), full)) == "invalid"


def test_prompt_tokens_that_wait_are_bounded():
    backlog = Backlog(QueueBounds(1000, max_num_queued_tokens=100))
    a = backlog.tenant(A)
    assert backlog.refusal(a, Ask(1, 1000), ROOM) is None, "behind nothing any prompt is taken"
    wait(backlog, A, 160)
    assert backlog.refusal(a, Ask(1, 20), ROOM) is None
    assert code_of(backlog.refusal(a, Ask(1, 21), ROOM)) == "overloaded"
    assert backlog.refusal(backlog.tenant(B), Ask(1, 21), ROOM) is None


def test_what_a_key_may_have_waiting_counts_beyond_what_could_run():
    backlog = Backlog(QueueBounds(1000))
    a = backlog.tenant(Tenant("a", max_running=2, max_waiting=1))
    assert backlog.refusal(a, Ask(3, 5), Room(free_slots=64)) is None
    assert code_of(backlog.refusal(a, Ask(4, 5), Room(free_slots=64))) == "invalid"
    assert code_of(backlog.refusal(a, Ask(3, 5), Room(free_slots=1))) == "rate_limited"
    assert backlog.refusal(a, Ask(2, 5), Room(free_slots=0)) is None, "others give it a slot"
    a.start(10)
    a.start(10)
    a.add_waiting(5, 10)
    refusal = backlog.refusal(a, Ask(1, 5), Room(free_slots=62))
    assert refusal.code == "rate_limited" and refusal.retry_after_s >= 1 and "may have 1" in refusal.text
    assert not a.may_start
    a.stop(10, 10)
    assert a.may_start


def test_tokens_a_minute_come_back_evenly():
    backlog = Backlog(QueueBounds(1000))
    a = backlog.tenant(Tenant("a", tokens_per_minute=600))
    assert backlog.refusal(a, Ask(1, 10_000), Room(now=100.0)) is None
    a.start(700)
    refusal = backlog.refusal(a, Ask(1, 5), Room(now=100.0))
    assert refusal.code == "rate_limited" and refusal.retry_after_s == 11 and "600 tokens a minute" in refusal.text
    assert backlog.refusal(a, Ask(1, 5), Room(now=109.0)) is not None
    assert backlog.refusal(a, Ask(1, 5), Room(now=111.0)) is None
    a.add_waiting(300, 600)
    assert code_of(backlog.refusal(a, Ask(1, 5), Room(now=111.0))) == "rate_limited", "what waits will need them"
    a.remove_waiting(300, 600)
    a.stop(700, 300)  # it needed less than was expected
    assert a.tokens_left(111.0) == pytest.approx(410.0) and a.tokens_left(1e6) == 600.0


def test_what_cannot_begin_in_time_is_refused_at_once():
    backlog = loaded()
    tenant = wait(backlog, None, 500)
    assert backlog.refusal(tenant, Ask(1, 5, timeout_s=6.0), ROOM) is None
    refusal = backlog.refusal(tenant, Ask(1, 5, timeout_s=4.0), ROOM)
    assert refusal.code == "deadline_exceeded" and refusal.retry_after_s == 0


def test_workers_that_are_away_for_too_long():
    backlog = loaded()
    tenant = backlog.tenant(None)
    assert backlog.refusal(tenant, Ask(1, 5, True), Room(down_s=29.0, start_s=7.2)) is None
    refusal = backlog.refusal(tenant, Ask(1, 5, True), Room(down_s=31.0, start_s=7.2))
    assert (refusal.code, refusal.retry_after_s) == ("unavailable", 8)
    assert backlog.refusal(tenant, Ask(1, 5), Room(down_s=31.0)) is None


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0, 1), (0.2, 1), (1.5, 2), (59.5, 60), (1e9, 60), (math.inf, 60), (math.nan, 60)]
)
def test_when_to_come_back(seconds, said):
    assert retry_after(seconds) == said


def test_limits_follow_the_latest_request_and_idle_tenants_are_forgotten():
    backlog = Backlog(QueueBounds(1000))
    busy = wait(backlog, A, 10)
    for i in range(1000):
        backlog.tenant(Tenant(f"key {i}"))
    assert backlog.tenant(A) is busy and len(list(backlog)) < 200
    backlog.tenant(Tenant("a", "a", max_running=1))
    assert busy.limits.max_running == 1


def test_metrics_have_a_bounded_number_of_labels():
    backlog = Backlog(QueueBounds(10**6))
    for i in range(100):
        wait(backlog, Tenant(f"key {i}", f"label {i}"), *[10] * (i + 1))
    wait(backlog, Tenant("without a label"), 10)
    stats = backlog.stats()
    assert len(stats) == MOST_REPORTED + 1 and stats[0].label == "label 99" and stats[-1].label == "other"
    assert sum(s.num_waiting for s in stats) == 5050


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e-30])
def test_a_weight_that_makes_no_sense_does_no_harm(weight):
    backlog = loaded()
    strange = wait(backlog, Tenant("a", weight=weight), 100, 100)
    wait(backlog, B, 100)
    assert 0.0 < strange.weight < math.inf and backlog.wait_s(strange) <= 3.0
