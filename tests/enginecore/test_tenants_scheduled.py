"""Tenants in the scheduler: whoever holds all slots gives one to a tenant without any, and prompts are computed in turn."""

import random

import pytest
from scheduler_harness import Harness

from quire.enginecore.tenants.tenant import TenantState
from quire.ipc.messages.frontend import Tenant


def turns_until(harness, condition, most=200):
    for turn in range(most):
        if condition():
            return turn
        harness.turn()
    raise AssertionError("it has not happened")


def test_a_tenant_without_a_slot_gets_that_of_the_youngest_sequence_of_one_with_all():
    h, a, b = Harness(num_blocks=400), TenantState(Tenant("a")), TenantState(Tenant("b"))
    names = [h.add([i, 1, 2], 40, tenant=a, ignore_eos=True) for i in range(8)]
    turns_until(h, lambda: len(h.outputs[names[3]]) > 3)
    own = h.add([9, 9], 3, tenant=b, ignore_eos=True)
    assert turns_until(h, lambda: own in h.finished) <= 10
    assert h.scheduler.counters.preemptions == 1 and names[3] not in h.finished
    h.run()
    h.assert_right()
    assert len(h.finished) == 9 and h.scheduler.counters.preemptions == 1
    assert a.is_idle and b.is_idle


def test_a_tenant_without_memory_gets_that_of_the_youngest_sequences_of_one_with_all():
    h, a, b = Harness(num_blocks=41), TenantState(Tenant("a")), TenantState(Tenant("b"))
    for i in range(9):
        h.add([i, 1, 2], 45, tenant=a, ignore_eos=True)
    for _ in range(20):
        h.turn()
    assert 1 < a.num_running < 4
    own = h.add([9] * 44, 10, tenant=b, ignore_eos=True)
    assert turns_until(h, lambda: own in h.finished) <= 22
    assert 0 < h.scheduler.counters.preemptions <= 3
    h.run()
    h.assert_right()


def test_a_tenants_own_later_requests_take_no_slot_from_it():
    h, a = Harness(num_blocks=400), TenantState(Tenant("a"))
    for i in range(12):
        h.add([i, 1, 2], 20, tenant=a)
    h.run()
    h.assert_right()
    assert h.scheduler.counters.preemptions == 0


def test_the_last_slot_of_a_tenant_is_not_taken():
    h = Harness(num_blocks=400, max_num_seqs=2)
    tenants = [TenantState(Tenant(str(i))) for i in range(4)]
    for i, tenant in enumerate(tenants):
        h.add([i, 1, 2], 20, tenant=tenant)
    h.run()
    h.assert_right()
    assert h.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_tenants_gets_the_right_tokens(seed):
    draw = random.Random(seed)
    tenants = [
        TenantState(Tenant(str(i), weight=draw.choice((0.5, 1, 4)), max_running=draw.choice((None, None, 1, 2))))
        for i in range(draw.randint(1, 4))
    ]
    h = Harness(
        num_blocks=draw.choice((24, 40, 400)), policy=draw.choice(("fcfs", "priority")), max_queue_s=draw.choice((0.0, 0.5))
    )
    for _ in range(60):
        if draw.random() < 0.5:
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 24))]
            h.add(
                prompt, draw.randint(1, 20), n=draw.choice((1, 1, 3)), tenant=draw.choice(tenants), priority=draw.randint(-3, 3)
            )
        h.turn(draw.choice((1, 2)))
    h.run()
    h.assert_right()
    assert all(tenant.is_idle for tenant in tenants)
    assert len(h.finished) == h.count


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_another_tenant():
    h, a, b = Harness(num_blocks=400, budget=8), TenantState(Tenant("a")), TenantState(Tenant("b"))
    for i in range(3):
        h.add([i, *range(40)], 3, tenant=a)
    h.turn()
    own = h.add([9, 9], 1, tenant=b)
    assert turns_until(h, lambda: own in h.finished) <= 5
    h.run()
    h.assert_right()


def test_one_tenants_steps_are_those_without_tenants():
    plans = []
    for tenant in (None, TenantState(Tenant("only", weight=7.0))):
        draw, h = random.Random(3), Harness(num_blocks=30)
        for _ in range(40):
            h.add([draw.randrange(9) for _ in range(draw.randint(1, 20))], draw.randint(1, 12), tenant=tenant)
            h.turn()
        h.run()
        plans.append([bytes(plan.encode()) for plan in h.plans])
    assert plans[0] == plans[1]
