"""The result ring: words that validate themselves, old entries, wrap of the step number, logprobs, sleeping."""

import os
import select

import numpy as np
import pytest

from quire.ipc.step.plan_ring import PlanRing, RingCorrupt
from quire.ipc.step.result_ring import ResultRing, RowLogprobs
from quire.ipc.step.sections import FIRST_PLACE, REJECTED, UNUSED, draft_words


@pytest.fixture
def ends():
    core = ResultRing.create(max_rows=6, num_logprobs=3, depth=4)
    worker = ResultRing.attach([os.dup(fd) for fd in core.fds()])
    yield core, worker
    core.close()
    worker.close()


def some_logprobs(rows: list[int]) -> RowLogprobs:
    k = len(rows)
    ids = np.arange(3 * k, dtype=np.int32).reshape(k, 3) + 100
    values = -np.arange(3 * k, dtype=np.float32).reshape(k, 3)
    return RowLogprobs(np.asarray(rows), np.full(k, -1.5, np.float32), np.arange(k, dtype=np.int32) + 1, ids, values)


def test_tokens_arrive(ends):
    core, worker = ends
    tokens = np.asarray([5, -1, 2**31 - 1, 0], np.int32)
    assert not core.ready(1, 4)
    worker.write(1, tokens)
    assert core.ready(1, 4) and core.ready(1, 2) and core.ready(2, 0)
    assert not core.ready(1, 5)
    got = core.samples(1, 4).tokens
    assert got.tolist() == tokens.tolist() and got.dtype == np.int32
    worker.write(5, tokens + 1)
    assert got.tolist() == tokens.tolist()  # a copy


def test_step_is_ready_only_when_each_of_its_words_is_there(ends):
    """As a GPU writes: word by word, in any order."""
    core, worker = ends
    entry = np.frombuffer(worker.buffer, np.uint64).reshape(4, -1)[3 % 4]
    for row in (2, 0, 3, 1):
        assert not core.ready(3, 4)
        entry[row] = 3 << 32 | row + 10
    assert core.ready(3, 4)
    assert core.samples(3, 4).tokens.tolist() == [10, 11, 12, 13]


def test_entries_are_reused_and_an_old_one_is_never_ready(ends):
    core, worker = ends
    for step in range(1, 30):
        assert not core.ready(step, 2)
        worker.write(step, np.asarray([step, -step], np.int32))
        for then in range(max(1, step - 3), step + 1):
            assert core.ready(then, 2)
            assert core.samples(then, 2).tokens.tolist() == [then, -then]
        assert not core.ready(step - 4, 2)


def test_step_number_wraps(ends):
    core, worker = ends
    for step in range(2**31 - 3, 2**31 + 6):
        assert not core.ready(step, 1)
        worker.write(step, np.asarray([step % 1000], np.int32))
        assert core.ready(step, 1)
        assert core.samples(step, 1).tokens.tolist() == [step % 1000]


def test_windows_have_several_samples_a_row():
    ring = ResultRing.create(max_rows=3, num_logprobs=3, depth=4, max_samples=8)
    words = np.asarray([7, 8, REJECTED, REJECTED, 9, -1, UNUSED], np.int32)  # of rows with 2, 0 and 1 drafts
    assert not ring.ready(1, 3, draft_tokens=4)
    ring.write(1, words)
    assert not ring.ready(1, 3, draft_tokens=4), "where rows begin is not known yet"
    ring.write(1, words, some_logprobs([1, 4]), np.asarray([0, 3, 4]))
    assert ring.ready(1, 3, draft_tokens=4) and not ring.ready(1, 3, draft_tokens=5)
    assert not ring.ready(1, 3, 4, [0]) and ring.ready(1, 3, 4, [1]), "row 1 has no sample that counts"
    samples = ring.samples(1, 3, 4)
    assert [x.tolist() for x in samples] == [[7, 8, 9, -1], [0, 0, 2, 2], [0, 1, 4, 5], [2, 0, 1]]
    assert samples.of_rows(np.asarray([2, 1, 0])) == [[9, -1], [], [7, 8]]
    assert ring.logprobs(1, np.asarray([4])).top_ids.tolist() == [[103, 104, 105]]
    ring.write(2, np.asarray([5, 6, 7], np.int32))  # a step without windows in the same ring
    assert ring.ready(2, 3) and [x.tolist() for x in ring.samples(2, 3)] == [[5, 6, 7], [0, 1, 2], [0, 1, 2], [0, 0, 0]]
    ring.close()


def test_drafts_come_before_tokens_and_outlive_their_ring():
    ring = ResultRing.create(max_rows=3, num_logprobs=3, depth=4, max_samples=8)
    words = np.frombuffer(ring.buffer, np.int64).reshape(4, -1)[:, draft_words(3, 8)]
    before, drafts = ring.drafts(1, 3, 4), ring.drafts(5, 3, 4)  # of one entry
    ids = np.asarray([FIRST_PLACE, 7, 8, FIRST_PLACE, FIRST_PLACE, 0, UNUSED], np.int32).view(np.uint32)
    words[1, :7] = np.int64(1 << 32) | ids
    assert before.have_come() and [before.of_row(row) for row in range(3)] == [[7, 8], [], [0]]
    words[1, :6] = np.int64(5 << 32) | ids[:6]
    assert not drafts.have_come() and not ring.ready(5, 3, 4)
    ring.close()
    words[1, 6] = np.int64(5 << 32) | ids[6]
    assert drafts.have_come() and drafts.of_row(0) == [7, 8] and before.of_row(2) == [0]


def test_logprobs_arrive_for_the_rows_that_have_them(ends):
    core, worker = ends
    worker.write(7, np.arange(6, dtype=np.int32), some_logprobs([4, 1]))
    assert core.ready(7, 6, 0, [4, 1]) and core.ready(7, 6, 0, []) and core.ready(7, 6, 0, np.asarray([1]))
    assert not core.ready(7, 6, 0, [0, 1])
    for rows in ([1], [4], [1, 4], [4, 1]):
        got = core.logprobs(7, np.asarray(rows))
        first = [0 if row == 4 else 3 for row in rows]  # of some_logprobs
        assert (got.logprobs.tolist(), got.ranks.tolist()) == ([-1.5] * len(rows), [1 + n // 3 for n in first])
        assert got.top_ids.tolist() == [[100 + n, 101 + n, 102 + n] for n in first]
        assert got.top_logprobs.tolist() == [[-n, -n - 1, -n - 2] for n in first]
    assert (got.top_ids.dtype, got.top_logprobs.dtype, got.ranks.dtype) == (np.int32, np.float32, np.int32)
    worker.write(11, np.zeros(6, np.int32), some_logprobs([0, 1, 2, 3, 4, 5]))  # the same entry
    assert got.top_ids.tolist() == [[100, 101, 102], [103, 104, 105]]  # a copy


def test_missing_alternatives_are_filled_up(ends):
    core, worker = ends
    worker.write(
        1, np.zeros(1, np.int32), some_logprobs([0])._replace(top_ids=np.asarray([[9]]), top_logprobs=np.zeros((1, 1)))
    )
    assert core.ready(1, 1, 0, [0])
    got = core.logprobs(1, np.asarray([0]))
    assert got.top_ids.tolist() == [[9, -1, -1]] and got.top_logprobs.tolist() == [[0.0, -np.inf, -np.inf]]


def test_what_does_not_fit_is_refused(ends):
    _, worker = ends
    with pytest.raises(ValueError, match="7 tokens"):
        worker.write(1, np.zeros(7, np.int32))
    with pytest.raises(ValueError, match="4 logprobs"):
        worker.write(1, np.zeros(1, np.int32), some_logprobs([0])._replace(top_ids=np.zeros((1, 4), np.int32)))


def test_core_is_rung_only_while_it_sleeps(ends):
    core, worker = ends

    def rings() -> bool:
        return bool(select.select([core.fileno()], [], [], 0)[0])

    worker.write(1, np.zeros(1, np.int32))
    assert not rings()
    assert not core.arm(1, 1)  # it is there: no sleep
    worker.ring_doorbell()
    assert not rings()
    assert core.arm(2, 1)
    worker.write(2, np.zeros(1, np.int32))
    assert rings()
    core.disarm()
    core.drain_doorbell()
    core.drain_doorbell()
    assert not rings()
    worker.ring_doorbell()
    assert not rings()


def test_header_tells_the_layout_and_the_workers_epoch(ends):
    core, worker = ends
    assert (worker.max_rows, worker.num_logprobs, worker.depth, worker.words_per_step) == (6, 3, 4, 6 * 9)
    worker.generation = 2**62 + 1
    assert core.generation == 2**62 + 1
    assert len(worker.buffer) == 4 * 54 * 8
    assert np.frombuffer(worker.buffer, np.uint8).ctypes.data % 4096 == 0


def test_ring_without_logprobs():
    ring = ResultRing.create(max_rows=3, num_logprobs=0)
    ring.write(1, np.arange(3, dtype=np.int32))
    assert ring.ready(1, 3) and ring.samples(1, 3).tokens.tolist() == [0, 1, 2]
    ring.close()


def test_attach_refuses_descriptors_of_something_else():
    plan = PlanRing.create(4096, 1)
    with pytest.raises(RingCorrupt):
        ResultRing.attach(plan.fds(0)[:2])
    with pytest.raises(ValueError, match="2 descriptors"):
        ResultRing.attach(plan.fds(0))
    plan.close()


def test_senseless_sizes_are_refused():
    for rows, logprobs, depth in ((0, 1, 8), (1, -1, 8), (1, 1, 6), (1, 1, 1)):
        with pytest.raises(ValueError, match="no result ring"):
            ResultRing.create(rows, logprobs, depth)
