"""WaitingQueue: who is first, in the queue of what it waits for."""

import random

import numpy as np
import pytest

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.scheduling.waiting import WaitingQueue
from quire.ipc.sampling import SamplingParams


def sequence(arrival, priority=0):
    params = SamplingParams()
    prompt = np.zeros(1, np.int32)
    return Sequence(
        0, arrival, arrival, 0, params, prompt, 2, 0, (priority, arrival), 0.0, frozenset(), blocks=SequenceBlocks(b"", False)
    )


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
        queue.wait_for_prefix(sequences[arrival], block_hash)
        queue.check()
    assert [s.order[1] for s in queue.could_start()] == [3, 5, 6, 7] and len(queue) == 8
    queue.remove(sequences[4])
    queue.prefix_resolved(b"a")
    queue.prefix_resolved(b"of nobody")
    queue.check()
    assert [s.order[1] for s in queue.could_start()] == [0, 1, 3, 5, 6, 7]
    queue.prefix_resolved(b"b")
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
            queue.prefix_resolved(block_hash)
            held = {s: h for s, h in held.items() if h != block_hash}
        else:
            able = [s for s in waiting if s not in held]
            expected = min(able, key=lambda s: s.order if policy == "priority" else s.order[1], default=None)
            assert queue.first() is expected
            if expected is not None and what < 0.8:
                held[expected] = bytes([r.randrange(3)])
                queue.wait_for_prefix(expected, held[expected])
        if arrival % 50 == 0:
            queue.check()
            assert len(queue) == len(waiting)
