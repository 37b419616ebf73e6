"""WaitingQueue: who is first, in the queue of what it waits for."""

import random

import numpy as np
import pytest

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.scheduling.waiting import WaitingQueue
from quire.enginecore.tasks.generate import GenerateTask
from quire.enginecore.tenants.tenant import TenantState
from quire.ipc.messages.frontend import Tenant
from quire.ipc.sampling import SamplingParams


def sequence(arrival, priority=0):
    task = GenerateTask(SamplingParams())
    prompt = np.zeros(1, np.int32)
    return Sequence(0, arrival, arrival, 0, task, prompt, 2, 0, (priority, arrival), 0.0, blocks=SequenceBlocks(b"", False))


def drain(queue):
    order = []
    while (seq := queue.first()) is not None:
        queue.remove(seq)
        queue.check()
        order.append(seq.order[1])
    return order


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [1, 2, 3, 4]), ("priority", [4, 2, 3, 1])])
def test_order(policy, expected):
    queue = WaitingQueue(policy)
    sequences = {arrival: sequence(arrival, priority) for arrival, priority in ((1, 3), (2, 1), (3, 1), (4, 0))}
    for arrival in (2, 1, 4, 3):  # as preempted ones come back
        queue.push(sequences[arrival])
    assert [s.order[1] for s in queue.could_start()] == expected
    assert len(queue) == 4 and set(queue) == set(sequences.values())
    assert drain(queue) == expected and not queue


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="no scheduling policy named 'lifo'"):
        WaitingQueue("lifo")


def test_who_waits_for_a_prefix_comes_back_to_its_place():
    queue = WaitingQueue("fcfs")
    sequences = [sequence(arrival) for arrival in range(8)]
    for seq in sequences:
        queue.push(seq)
    for arrival, block_hash in ((0, b"a"), (1, b"a"), (4, b"a"), (2, b"b")):
        queue.wait_for(sequences[arrival], block_hash)
        queue.check()
    assert [s.order[1] for s in queue.could_start()] == [3, 5, 6, 7] and len(queue) == 8
    queue.remove(sequences[4])
    queue.resolved(b"a")
    queue.resolved(b"unknown")
    queue.check()
    assert [s.order[1] for s in queue.could_start()] == [0, 1, 3, 5, 6, 7]
    queue.resolved(b"b")
    assert drain(queue) == [0, 1, 2, 3, 5, 6, 7]


def test_removing_what_does_not_wait_is_an_error():
    queue = WaitingQueue("fcfs")
    seq = sequence(1)
    queue.push(seq)
    queue.no_room_for = seq
    queue.remove(seq)
    assert queue.no_room_for is None
    with pytest.raises(KeyError):
        queue.remove(seq)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_as_a_plain_list_would(policy):
    """Any history, against a list that is searched from the front."""
    r = random.Random(1)
    queue, waiting, held = WaitingQueue(policy), [], {}
    for arrival in range(2000):
        what = r.random()
        if what < 0.5:
            waiting.append(sequence(arrival, r.randint(0, 3)))
            queue.push(waiting[-1])
        elif what < 0.6 and waiting:
            seq = waiting.pop(r.randrange(len(waiting)))
            queue.remove(seq)
            held.pop(seq, None)
        elif what < 0.65:
            block_hash = bytes([r.randrange(3)])
            queue.resolved(block_hash)
            held = {s: h for s, h in held.items() if h != block_hash}
        else:
            able = [s for s in waiting if s not in held]
            expected = min(able, key=lambda s: s.order if policy == "priority" else s.order[1], default=None)
            assert queue.first() is expected
            if expected is not None and what < 0.8:
                held[expected] = bytes([r.randrange(3)])
                queue.wait_for(expected, held[expected])
        if arrival % 50 == 0:
            queue.check()
            assert len(queue) == len(waiting)


# ------------------------------------------------------------------------------------------------------------- tenants
def of(tenant, arrival, priority=0, expected=10, arrival_time=0.0):
    seq = sequence(arrival, priority)
    seq.tenant, seq.expected_output, seq.arrival_time = tenant, expected, arrival_time
    return seq


def start(queue):
    """Start and end the first sequence as if it had needed what was expected; returns it."""
    seq = queue.first()
    queue.remove(seq)
    queue.started(seq, len(seq.prompt), 0)
    queue.check()
    return seq


def end(queue, seq, num_output=10):
    seq.num_computed = len(seq.prompt)
    queue.stopped(seq, len(seq.prompt) + num_output)


def test_a_tenant_with_one_request_does_not_wait_for_one_with_many():
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a")), TenantState(Tenant("b"))
    for arrival in range(100):
        queue.push(of(a, arrival))
    served = [start(queue) for _ in range(10)]
    queue.push(of(b, 100))
    assert start(queue).tenant is b and start(queue).tenant is a
    for seq in served:
        end(queue, seq)
    assert a.num_running == 1 and a.num_waiting == 89 and b.num_waiting == 0


@pytest.mark.parametrize(("weight", "share"), [(1.0, 50), (3.0, 75), (0.25, 20)])
def test_tenants_get_tokens_by_their_weights(weight, share):
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a", weight=weight)), TenantState(Tenant("b"))
    for arrival in range(1000):
        queue.push(of(a, arrival, expected=9))
        queue.push(of(b, arrival + 1000, expected=19))  # twice as long: half as many
    tokens = {id(a): 0, id(b): 0}
    while sum(tokens.values()) < 6000:
        seq = start(queue)
        tokens[id(seq.tenant)] += len(seq.prompt) + seq.expected_output
        end(queue, seq, seq.expected_output)
    assert 100 * tokens[id(a)] / sum(tokens.values()) == pytest.approx(share, abs=2)


def test_what_was_needed_is_charged_and_not_what_was_expected():
    queue, a = WaitingQueue("fcfs"), TenantState(Tenant("a"))
    for arrival, computed, output, needs in ((1, 1, 40, 41), (2, 1, 0, 1), (3, 0, 0, 0)):
        before, seq = a.served, of(a, arrival)
        queue.push(seq)
        start(queue)
        assert a.served - before == 11
        seq.num_computed = computed
        queue.stopped(seq, len(seq.prompt) + output)
        assert a.served - before == needs and a.is_idle


def test_who_comes_back_has_saved_nothing_up():
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a")), TenantState(Tenant("b"))
    queue.push(of(b, 0))
    end(queue, start(queue))
    for arrival in range(1, 200):
        queue.push(of(a, arrival))
    for _ in range(100):
        end(queue, start(queue))
    for arrival in range(200, 300):
        queue.push(of(b, arrival))
    turns = [start(queue).tenant is b for _ in range(20)]
    assert sum(turns) == pytest.approx(10, abs=1)


def test_a_tenant_with_all_that_it_may_have_running_is_left_out():
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a", max_running=2)), TenantState(Tenant("b"))
    for arrival in range(5):
        queue.push(of(a, arrival))
    first, _ = start(queue), start(queue)
    assert queue.first() is None and list(queue.could_start()) == [] and queue.num_to_schedule == 3
    queue.push(of(b, 9))
    assert [s.tenant for s in queue.could_start()] == [b] and start(queue).tenant is b
    end(queue, first)
    assert queue.first().order[1] == 2


def test_priorities_count_within_a_tenant():
    queue, a, b = WaitingQueue("priority"), TenantState(Tenant("a")), TenantState(Tenant("b"))
    for arrival in range(10):
        queue.push(of(a, arrival, priority=-5))
    queue.push(of(a, 10, priority=-6))
    queue.push(of(b, 11, priority=0))
    first, second = start(queue), start(queue)
    assert {first.tenant, second.tenant} == {a, b} and {first.order[1], second.order[1]} == {10, 11}


def test_a_low_priority_is_served_before_later_ones_when_it_has_waited_long_enough():
    queue = WaitingQueue("priority", 30.0)
    for arrival in range(5):
        queue.push(of(None, arrival, priority=0, arrival_time=100.0 + arrival))
    for arrival in range(5, 10):
        queue.push(of(None, arrival, priority=-5, arrival_time=100.0 + arrival))
    deferred = of(None, 10, priority=3, arrival_time=90.0)
    deferred.is_deferred = True
    queue.push(deferred)
    queue.age(120.0)
    assert queue.first().order[1] == 5
    queue.age(131.5)
    queue.check()
    assert [s.order[1] for s in queue.could_start()] == [0, 1, 5, 6, 7, 8, 9, 2, 3, 4]
    back = start(queue)
    end(queue, back)
    queue.push(back)  # preempted
    deferred.is_deferred = False
    queue.release(deferred)
    queue.age(131.5)
    queue.check()
    assert [s.order[1] for s in queue.could_start()][:3] == [0, 1, 10]


def test_prefixes_of_several_tenants_come_back_to_their_queues():
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a")), TenantState(Tenant("b"))
    sequences = [of((a, b)[arrival % 2], arrival) for arrival in range(6)]
    for seq in sequences:
        queue.push(seq)
    for seq in sequences[:4]:
        queue.wait_for(seq, b"x")
        queue.check()
    queue.resolved(b"x")
    queue.check()
    assert sorted(s.order[1] for s in queue.could_start()) == list(range(6)) and a.num_waiting == b.num_waiting == 3


def test_what_a_preemption_frees_is_the_tenants_that_it_was_for():
    queue, a, b = WaitingQueue("fcfs"), TenantState(Tenant("a")), TenantState(Tenant("b"))
    for arrival in range(3):
        queue.push(of(a, arrival, expected=1000))
    first, second = start(queue), start(queue)
    queue.push(of(b, 3))
    end(queue, first, 1)  # it needed much less than expected, so its tenant would be next again
    end(queue, second, 0)
    queue.push(second)
    assert queue.first() is second
    queue.owe(next(seq for seq in queue if seq.tenant is b))
    assert start(queue).tenant is b and queue.first() is second
