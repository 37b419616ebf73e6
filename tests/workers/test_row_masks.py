"""Masks of a step's rows on a device: set while a step expects them, then set back; buffers for copies are used again."""

import os

import numpy as np
import pytest
import torch

from quire.ipc.step.masks import area_records, mask_names, mask_records
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.plan_ring import KIND_MASK, PlanReader, PlanRing, RingFull
from quire.workers.devices.masks import CpuMasks, CudaMasks, PinnedRing, Staging
from quire.workers.records import Records

ROWS, VOCAB = 9, 70
WORDS = 3


class Event:
    """As torch.cuda.Event; `done` when the copy is."""

    def __init__(self) -> None:
        self.done = self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.done


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
    assert masks.tensor.data_ptr() == address  # captured sampling graphs hold it


def test_masks_of_places_lie_at_the_samples_of_their_rows(masks):
    """In a step with windows; they are set back in the next step, whether that has windows or not."""

    def names(*rows_and_places: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        rows, places = np.asarray(rows_and_places, np.int32).T
        return mask_names(rows, places), np.tile((100 + first[rows] + places)[:, None], (1, WORDS)).astype(np.int32)

    for first in (np.asarray([0, 3, 4, 8], np.int32), np.asarray([0, 1, 2, 5], np.int32)):
        first_sample = torch.from_numpy(first).to(masks.tensor.device)
        free = (np.asarray([1], np.int32), None)
        records = [names((2, 0), (2, 1), (0, 0), (0, 1), (0, 2)), free, names((3, 0))]
        assert masks.load(np.asarray([0, 1, 2, 3], np.int32), records, first_sample).tolist() == [0, 2, 1, 3]
        assert masks.tensor.tolist() == expected(0, 1, 2, first[2], first[2] + 1, first[3])
        assert masks.load(np.asarray([1], np.int32), [record(1)]).tolist() == [1]
        assert masks.tensor.tolist() == expected(1)
    masks.load(np.zeros(0, np.int32), [], first_sample)
    assert masks.tensor.tolist() == expected()


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


# ---------------------------------------------------------------------------------------------- out of the ring itself
class Pinned:
    """A ring and masks that are copied out of it; without a GPU, so a copy is done when its event is said to be."""

    def __init__(self, capacity_words: int, vocab_size: int = VOCAB) -> None:
        self.ring, self.events = PlanRing.create(capacity_words, 1, 1 << 10), []
        self.reader = PlanReader.attach([os.dup(fd) for fd in self.ring.fds(0)])
        self.records = Records(self.reader)
        self.masks = CudaMasks(ROWS, vocab_size, torch.device("cpu"))
        self.masks._ring = PinnedRing(self.reader, self._event)
        self.masks._staging = Staging(self._staged, Event)

    def _event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def _staged(self) -> torch.Tensor:
        raise AssertionError("what lies in the ring need not be copied to a buffer")

    def send(self, step: int, rows: np.ndarray, masks: np.ndarray) -> None:
        for parts in mask_records(step, rows, masks, self.ring.max_record_words):
            self.ring.write_parts(KIND_MASK, parts, 0.0)

    def load(self, step: int, *rows: int) -> None:
        due = np.asarray(rows, np.int32)
        assert self.masks.load(due, self.records.masks(StepPlan(step, {"mask_rows": due}))).tolist() == list(rows)

    def close(self) -> None:
        self.reader.close()
        self.ring.close()


@pytest.fixture
def pinned():
    pinned = Pinned(1 << 10)
    yield pinned
    pinned.close()


@pytest.mark.parametrize("order", [(2, 3, 4), (4, 2, 3), (2, 4, 6), (6, 2, 4), (7,)])
def test_masks_are_copied_from_where_they_lie_in_the_ring(pinned, order):
    pinned.send(3, *record(*order))
    pinned.load(3, *order)
    assert pinned.masks.tensor.tolist() == expected(*order)
    assert pinned.events and all(event.recorded for event in pinned.events)


def test_masks_in_the_area_are_copied_from_there_whatever_their_rows(pinned):
    masks = pinned.ring.area.take(3, WORDS)
    rows, masks[:] = record(6, 2, 4)
    for parts in area_records(3, rows, pinned.ring.area.place_of(masks), WORDS):
        pinned.ring.write_parts(KIND_MASK, parts, 0.0)
    pinned.load(3, 6, 2, 4)
    assert pinned.masks.tensor.tolist() == expected(6, 2, 4)


def test_a_records_place_is_given_back_once_its_copy_is_done(pinned):
    rows, wide = np.asarray([1, 2], np.int32), np.zeros((2, 240), np.int32)
    pinned.masks.tensor = torch.zeros(ROWS, 240, dtype=torch.int32)
    for step in (1, 2):  # each is half of the ring
        pinned.send(step, rows, wide + step)
        pinned.load(step, 1, 2)
    assert pinned.records.read(0.0, 0.0) is None
    with pytest.raises(RingFull):
        pinned.send(3, rows, wide)
    pinned.events[0].done = True
    assert pinned.records.read(0.0, 0.0) is None
    pinned.send(3, rows, wide + 3)
    pinned.load(3, 1, 2)
    assert (pinned.masks.tensor[1:3] == 3).all()


def test_masks_that_lie_elsewhere_are_staged(pinned):
    pinned.masks._staging = Staging(lambda: torch.empty(64, dtype=torch.int32), Event)
    rows, words = record(1, 2)
    assert pinned.masks.load(rows, [(rows, words)]).tolist() == [1, 2]
    assert pinned.masks.tensor.tolist() == expected(1, 2) and not pinned.events


def test_a_worker_on_a_gpu_reads_masks_out_of_its_ring_and_lets_go_of_it(monkeypatch, pinned):
    """The driver, played here: it page-locks the ring where it lies, for reading alone, or does not."""
    calls = []

    class Driver:
        error = 0

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            calls.append((address, num_bytes, flags))
            return self.error

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(address)
            return 0

    driver, memory = Driver(), pinned.reader.memory
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    masks = CudaMasks(ROWS, VOCAB, torch.device("cpu"))
    masks.read_from(pinned.reader)
    masks.close()
    masks.close()
    assert calls == [(memory.ctypes.data, memory.nbytes, 8), memory.ctypes.data]
    driver.error = 801
    masks.read_from(pinned.reader)
    assert masks._ring is None
    masks.close()
    assert len(calls) == 3
