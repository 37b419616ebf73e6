"""Masks of a step's rows on a device: set while a step expects them, then set back; buffers for copies are used again."""

import numpy as np
import pytest
import torch

from quire.workers.devices.masks import CpuMasks, CudaMasks, Staging

ROWS, VOCAB = 9, 70
WORDS = 3


def record(*rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(rows, np.int32), np.asarray([[100 + row] * WORDS for row in rows], np.int32).reshape(-1, WORDS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def masks(request):
    return CpuMasks(ROWS, VOCAB) if request.param == "cpu" else CudaMasks(ROWS, VOCAB, torch.device("cuda"))


def expected(*rows: int) -> list[list[int]]:
    return [[100 + row if row in rows else -1] * WORDS for row in range(ROWS)]


def test_a_row_has_its_mask_for_one_step(masks):
    address = masks.tensor.data_ptr()
    for step in ([record(3, 1), record(8)], [record(1)], [], [record(*range(ROWS))], [record(0, 8)], [record(7)] * 2):
        rows = [int(r) for some, _ in step for r in some]
        assert masks.load(np.asarray(rows, np.int32), step).tolist() == rows
        assert masks.tensor.tolist() == expected(*rows)
    assert masks.tensor.data_ptr() == address  # captured tails hold it


def test_rows_in_any_order_and_with_others_between_them(masks):
    """Of those that have one in each step nothing is set back in between; those that may be any token are."""
    free = (np.asarray([4, 2], np.int32), None)
    for step in ([record(5, 3, 4, 2)], [record(2, 3), record(5, 4)], [record(5, 3), free], [record(3, 5), free], [free]):
        rows = [int(r) for some, _ in step for r in some]
        assert masks.load(np.asarray(rows, np.int32), step).tolist() == rows
        assert masks.tensor.tolist() == expected(*(int(r) for some, words in step if words is not None for r in some))


def test_a_row_whose_mask_did_not_come_is_set_back_when_it_expects_none(masks):
    both, first, other = (np.asarray(rows, np.int32) for rows in ([1, 2], [1], [5]))
    masks.load(both, [record(1, 2)])
    assert masks.load(both, [record(1)]).tolist() == first.tolist()  # row 2 is another's business now
    masks.load(other, [record(5)])
    assert masks.tensor.tolist() == expected(5)


def test_a_record_may_be_overwritten_once_the_next_is_asked_for(masks):
    rows, words = record(2)

    def records():
        yield rows, words
        rows[:], words[:] = 5, 105
        yield rows, words

    assert masks.load(np.asarray([2, 5], np.int32), records()).tolist() == [2, 5]
    assert masks.tensor.tolist() == expected(2, 5)


@pytest.mark.parametrize("order", [(2, 3, 4), (4, 2, 3), (2, 4, 6), (6, 2, 4)])
def test_copies_to_a_device_are_staged_in_any_order(order):
    """Without a GPU: buffers that are not pinned, copies that are done at once."""
    masks = CudaMasks(ROWS, VOCAB, torch.device("cpu"))
    masks._staging = Staging(lambda: torch.empty(64, dtype=torch.int32), Event)
    assert masks.load(np.asarray(order, np.int32), [record(*order)]).tolist() == list(order)
    assert masks.tensor.tolist() == expected(*order)


class Event:
    """As torch.cuda.Event; `done` when the copy is."""

    def __init__(self) -> None:
        self.done = self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.done


def test_a_buffer_is_used_again_when_its_copy_is_done_and_never_before():
    made, events = [], []

    def make_event() -> Event:
        events.append(Event())
        return events[-1]

    def make() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    staging = Staging(make, make_event)
    for _ in range(3):
        staging.copying(staging.take())
    assert len(made) == 3 and all(e.recorded for e in events)
    events[1].done = True  # copies end in order: the first is under way yet
    assert staging.take() is made[3]
    events[0].done = True
    assert [staging.take() for _ in range(2)] == [made[0], made[1]]
    assert staging.take() is made[4]
