"""On a GPU: masks are copied out of the plan ring itself, and no record is overwritten while a copy from it is under way."""

import os
import threading

import numpy as np
import pytest
import torch

from quire.ipc.step.masks import area_records, mask_records
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.plan_ring import KIND_MASK, PlanReader, PlanRing
from quire.workers.devices.masks import CudaMasks
from quire.workers.records import Records

pytestmark = pytest.mark.gpu

ROWS, WORDS, STEPS = 64, 4748, 300
FORWARD_CYCLES = 1_000_000  # about half a millisecond: copies of several steps wait behind it
ORDERS = {
    "one behind the other": np.arange(ROWS, dtype=np.int32),
    "with rows between them": np.arange(0, 2 * ROWS, 2, dtype=np.int32),
    "in any order": np.random.default_rng(0).permutation(ROWS).astype(np.int32),
}


def masks_of(step: int, rows: np.ndarray) -> np.ndarray:
    """int32 [rows, WORDS], no two words of a step alike."""
    return (rows[:, None] * np.int32(WORDS) + np.arange(WORDS, dtype=np.int32)) * np.int32(7) + np.int32(step)


class Core(threading.Thread):
    """Writes the masks of all steps in two parts each, as soon as there is room: the ring turns many times."""

    def __init__(self, ring: PlanRing, rows: np.ndarray) -> None:
        super().__init__(name="test-core")
        self.ring, self.rows, self.error = ring, rows, None
        self.num_placed = 0

    def run(self) -> None:
        try:
            for step in range(STEPS):
                for some in np.split(self.rows, 2):
                    if self.ring.area is not None and (masks := self.ring.area.take(len(some), WORDS)) is not None:
                        self.place(step, some, masks)
                        continue
                    for parts in mask_records(step, some, masks_of(step, some), self.ring.max_record_words):
                        self.ring.write_parts(KIND_MASK, parts, 20.0)
        except Exception as error:
            self.error = error

    def place(self, step: int, rows: np.ndarray, masks: np.ndarray) -> None:
        masks[:] = masks_of(step, rows)
        place = self.ring.area.place_of(masks)
        for parts in area_records(step, rows, place, WORDS):
            self.ring.write_parts(KIND_MASK, parts, 20.0)
        self.ring.area.named(place, self.ring.position)
        self.num_placed += 1


@pytest.fixture(params=[0, 1 << 20], ids=["in records", "in the area"])
def ring(request):
    ring = PlanRing.create(1 << 20, 1, request.param)  # each of 3 steps' masks
    yield ring
    ring.close()


@pytest.mark.parametrize("is_locked", [True, False], ids=["out of the ring", "staged"])
@pytest.mark.parametrize("rows", ORDERS.values(), ids=ORDERS.keys())
def test_masks_through_a_ring_that_turns_many_times(ring, rows, is_locked):
    reader = PlanReader.attach([os.dup(fd) for fd in ring.fds(0)])
    records, masks = Records(reader), CudaMasks(2 * ROWS, WORDS * 32 - 1, torch.device("cuda"))
    if is_locked:
        masks.read_from(reader)
        if masks._ring is None:
            pytest.skip("this driver page-locks no memory that is mapped for reading alone")
    core, stream = Core(ring, rows), torch.cuda.Stream()
    core.start()
    at = torch.from_numpy(rows).long().cuda()
    first = torch.from_numpy(masks_of(0, rows)).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for step in range(STEPS):
            torch.cuda._sleep(FORWARD_CYCLES)
            loaded = masks.load(np.sort(rows), records.masks(StepPlan(step, {"mask_rows": np.sort(rows)})))
            assert sorted(loaded.tolist()) == sorted(rows.tolist())
            num_wrong += (masks.tensor[at] != first + step).sum()
        while records.read(0.0, 0.0) is None and reader._held:
            pass  # all of it is given back in the end
        stream.synchronize()  # the last steps are checked, and nothing that they read is freed before
    core.join()
    assert core.error is None
    assert int(num_wrong) == 0
    assert core.num_placed > (STEPS // 10 if ring.area is not None else -1)
    assert is_locked or not reader._held
    masks.close()
    reader.close()


def test_page_locking_that_fails_leaves_no_error_behind(ring):
    reader = PlanReader.attach([os.dup(fd) for fd in ring.fds(0)])
    first, second = (CudaMasks(4, WORDS * 32 - 1, torch.device("cuda")) for _ in range(2))
    first.read_from(reader)
    second.read_from(reader)  # locked already
    assert second._ring is None
    assert torch.ones(3, device="cuda").sum().item() == 3
    first.close()
    reader.close()
