"""What a step's results become: each row's own log-probabilities, cut to what was asked, for the frontend that asked."""

import os

import numpy as np
import pytest

from quire.enginecore.publish import messages_of, read_logprobs, side_messages
from quire.enginecore.scheduling.step import StepOutput
from quire.enginecore.tasks.task import SideTarget
from quire.ipc.messages.frontend import Finished, PromptLogprobs, Started
from quire.ipc.messages.workers import PromptLogprobsOfRow
from quire.ipc.step.result_ring import ResultRing, RowLogprobs

STEP, EPOCH, TOP = 5, 77, 4


@pytest.fixture
def ring():
    """Six rows; every number in it says which row it is of."""
    core = ResultRing.create(max_rows=6, num_logprobs=TOP)
    worker = ResultRing.attach([os.dup(fd) for fd in core.fds()])
    rows = np.arange(6)
    ids = (100 * rows[:, None] + np.arange(TOP)).astype(np.int32)
    worker.write(
        STEP, rows.astype(np.int32), RowLogprobs(rows, -rows.astype(np.float32), (rows + 1).astype(np.int32), ids, -ids / 8)
    )
    yield core
    core.close()
    worker.close()


def output(rows: list[int], wants: list[bool], owners: list[int]) -> StepOutput:
    """Row r has token 10 + r and key 1000 + r."""
    r = np.asarray(rows)
    return StepOutput(np.asarray(owners), 1000 + r.astype(np.int64), (10 + r).astype(np.int32), r, np.asarray(wants), r / 8, r)


def assert_of_row(logprobs, row: int, num: int) -> None:
    assert (logprobs.logprob, logprobs.rank) == (-row, row + 1)
    assert np.frombuffer(logprobs.top_ids, np.int32).tolist() == [100 * row + i for i in range(num)]
    assert np.frombuffer(logprobs.top_logprobs, np.float32).tolist() == [-(100 * row + i) / 8 for i in range(num)]


def test_each_row_has_its_own_logprobs(ring):
    num_logprobs = np.asarray([4, 0, 3, 1, 2, 4], np.int32)  # by row of the step
    out = output([0, 2, 3, 5], [True, True, False, True], [1] * 4)  # rows 1 and 4 were dropped meanwhile
    got = read_logprobs(out, ring, STEP, num_logprobs)
    assert len(got) == 3
    for logprobs, row, num in zip(got, (0, 2, 5), (4, 3, 4), strict=True):
        assert_of_row(logprobs, row, num)


def test_none_are_read_where_none_are_wanted(ring):
    assert read_logprobs(output([0, 1], [False, False], [1, 1]), ring, STEP, np.zeros(6, np.int32)) == []
    (only,) = read_logprobs(output([1, 4], [False, True], [1, 1]), ring, STEP, np.zeros(6, np.int32))
    assert_of_row(only, 4, 0)


@pytest.mark.parametrize("owners", [[7, 7, 7, 7], [7, 9, 7, 9]])
def test_every_frontend_gets_its_tokens_with_their_logprobs(ring, owners):
    out = output([0, 1, 3, 5], [True, True, False, True], owners)
    out.finished, out.started = [(owners[1], Finished(1001, "stop"))], [(owners[3], Started(1005, 0, 0.5))]
    logprobs = read_logprobs(out, ring, STEP, np.full(6, 2, np.int32))
    messages = dict(messages_of(out, logprobs, EPOCH))
    assert set(messages) == set(owners)
    for owner, message in messages.items():
        mine = [row for row, o in zip((0, 1, 3, 5), owners, strict=True) if o == owner]
        assert np.frombuffer(message.keys, np.int64).tolist() == [1000 + row for row in mine]
        assert np.frombuffer(message.tokens, np.int32).tolist() == [10 + row for row in mine]
        with_logprobs = [row for row in mine if row != 3]
        for got, row in zip(message.logprobs, with_logprobs, strict=True):
            assert_of_row(got, row, 2)
        assert [f.key for f in message.finished] == [1001] * (owner == owners[1])
        assert [s.key for s in message.started] == [1005] * (owner == owners[3])


@pytest.mark.parametrize("owners", [[7] * 6, [7, 9, 9, 9, 7, 7]])
def test_drafts_are_told_by_sequence_where_that_is_wanted(owners):
    out = output([0, 1, 1, 1, 3, 4], [False] * 6, owners)  # row 1 gets three tokens; row 2 was dropped meanwhile
    out.drafted = np.asarray([0, 5, 7, 2, 1], np.int32)
    expected = [(owners[1], 1001, 5, 2), (owners[4], 1003, 2, 0), (owners[5], 1004, 1, 0)]
    for owner, message in messages_of(out, [], EPOCH, tells_drafts=True):
        told = np.frombuffer(message.drafts, np.int64).reshape(-1, 3).tolist()
        assert told == [list(counts) for to, *counts in expected if to == owner]
    assert all(message.drafts == b"" for _, message in messages_of(out, [], EPOCH))


def test_side_results_go_to_those_whose_rows_they_are_of():
    def of_row(row: int, positions: int) -> PromptLogprobsOfRow:
        column = np.full(positions, row, np.int32).tobytes()
        return PromptLogprobsOfRow(row, column, column, column * 3, column * 3)

    targets = {2: SideTarget(7, 20, 1), 5: SideTarget(9, 50, 33), 6: SideTarget(7, 60, 1)}
    messages = side_messages([of_row(5, 4), of_row(2, 2), of_row(6, 0)], targets, EPOCH)  # a prompt of one token has none
    assert [(owner, m.id, m.start, m.num_top) for owner, m in messages] == [(9, 50, 33, 3), (7, 20, 1, 3)]
    assert all(isinstance(m, PromptLogprobs) and m.epoch == EPOCH for _, m in messages)
    assert [np.frombuffer(m.ranks, np.int32).tolist() for _, m in messages] == [[5] * 4, [2] * 2]
