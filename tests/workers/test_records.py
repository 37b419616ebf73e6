"""Records: what a worker's loop gets from the plan ring while steps wait for masks; and its answers to control requests.

The ring is real; a test is its core.
"""

import dataclasses
import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from core_by_hand import worker_template

from quire.enginecore.workers import AREA_WORDS, RING_WORDS, WorkerGroup
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.messages.workers import ControlReply, DumpStacks
from quire.ipc.step.control import encode_control
from quire.ipc.step.masks import MASK_RECORD_WORDS, mask_names, rows_and_places
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_PLAN, KIND_SHUTDOWN, PlanReader, PlanRing
from quire.workers import worker as worker_module
from quire.workers.records import Records
from quire.workers.worker import Worker

NOTHING = np.zeros(0, np.int32)


class Core:
    """A core's end of a ring, and the records at the other."""

    def __init__(self, capacity_words: int = 1 << 12, area_words: int = 0) -> None:
        self.group = WorkerGroup(worker_template())
        self.ring = self.group.plan_ring = PlanRing.create(capacity_words, 1, area_words)
        self.reader = PlanReader.attach([os.dup(fd) for fd in self.ring.fds(0)])
        self.records = Records(self.reader)

    def close(self) -> None:
        self.reader.close()
        self.ring.close()

    def masks(self, step: int, *rows: int) -> None:
        """Masks of 3 words that hold the row's number."""
        masks = np.asarray([[row, row, row] for row in rows], np.int32).reshape(-1, 3)
        self.group.send_masks(step, np.asarray(rows, np.int32), masks)

    def come(self, plan: StepPlan) -> dict[int, int]:
        """What a step takes: row -> first word of its mask."""
        return {r: m[0] for rows, masks in self.records.masks(plan) for r, m in zip(rows.tolist(), masks.tolist(), strict=True)}


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.close()


def waiting(step: int, *rows: int) -> StepPlan:
    return StepPlan(step, {"mask_rows": np.asarray(rows, np.int32)})


def test_a_step_takes_its_masks_from_several_records(core):
    core.masks(7, 4, 1)
    core.masks(7, 2)
    core.ring.write(KIND_PLAN, NOTHING, 0.0)
    assert core.come(waiting(7, 1, 2, 4)) == {4: 4, 1: 1, 2: 2}
    assert core.records.read(0.0, 0.0)[0] == KIND_PLAN


def test_a_row_with_a_window_has_its_masks_once_all_of_them_came(core):
    plan = dataclasses.replace(waiting(7, 0, 1, 2, 3), window=4)
    rows, places = np.asarray([[1, 1, 1, 3], [0, 1, 2, 1]], np.int32)
    masks = np.arange(12, dtype=np.int32).reshape(4, 3)
    core.group.send_any_token(7, np.asarray([2], np.int32))
    core.group.send_masks(7, mask_names(rows, places), masks, windows=True)
    core.group.send_no_masks(7, np.asarray([0], np.int32))
    core.ring.write(KIND_PLAN, NOTHING, 0.0)
    (free, nothing), (names, came) = [(some.copy(), words) for some, words in core.records.masks(plan)]
    assert free.tolist() == [2] and nothing is None
    assert [x.tolist() for x in rows_and_places(names)] == [rows.tolist(), places.tolist()] and came.shape == (4, 3)
    assert core.records.read(0.0, 0.0)[0] == KIND_PLAN


def test_masks_are_read_where_they_were_made():
    core = Core(1 << 10, 1 << 12)
    masks = core.ring.area.take(3, 1000)
    masks[:] = np.asarray([[4], [2], [9]])
    core.group.send_masks(7, np.asarray([4, 2, 9], np.int32), masks)
    core.masks(7, 1)
    assert core.ring.position * 4 < 1000  # words that the records took
    masks[0] = 5
    assert core.come(waiting(7, 1, 2, 4, 9)) == {4: 5, 2: 2, 9: 9, 1: 1}
    core.close()


def test_a_mask_for_every_row_of_the_largest_step_arrives():
    """1,024 rows of a vocabulary of 151,936: 4.86 M words, where a record takes 4.19 M."""
    core = Core(RING_WORDS)
    rng = np.random.default_rng(0)
    masks = rng.integers(-(2**31), 2**31, (1024, 151_936 // 32), dtype=np.int64).astype(np.int32)
    rows = rng.permutation(1024).astype(np.int32)
    assert masks.size > core.ring.max_record_words
    core.group.send_masks(3, rows, masks)
    seen = np.zeros(1024, bool)
    for some, theirs in core.records.masks(waiting(3, *range(1024))):
        assert (theirs == masks[np.argsort(rows)[some]]).all()
        seen[some] = True
    assert seen.all()
    core.close()


def test_a_record_names_no_more_masks_than_a_workers_buffers_take():
    """384 rows of a vocabulary of 151,936 are made at once: 1.82 M words, where a buffer takes 1.05 M."""
    core = Core(1 << 12, AREA_WORDS)
    masks = core.ring.area.take(384, 4749)
    masks[:] = np.arange(384, dtype=np.int32)[:, None]
    core.group.send_masks(3, np.arange(0, 768, 2, dtype=np.int32), masks)
    seen = []
    for rows, theirs in core.records.masks(waiting(3, *range(0, 768, 2))):
        assert rows.size + theirs.size <= MASK_RECORD_WORDS
        assert (theirs == rows[:, None] // 2).all()
        seen += rows.tolist()
    assert seen == list(range(0, 768, 2))
    del masks, theirs
    assert core.ring.area.take(884, 4749) is None  # named to the last record
    core.records.read(0.0, 0.0)
    assert core.ring.area.take(883, 4749) is not None
    core.close()


def test_rows_that_get_no_mask_are_left_out(core):
    core.masks(7, 1)
    core.group.send_no_masks(7, np.asarray([2], np.int32))
    assert core.come(waiting(7, 1, 2)) == {1: 1}
    assert core.records.read(0.0, 0.0) is None


@pytest.mark.parametrize("kind", [KIND_PLAN, KIND_SHUTDOWN])
def test_what_comes_instead_of_masks_ends_the_waiting_and_is_not_lost(core, kind):
    core.masks(7, 1)
    core.ring.write(kind, np.asarray([5, 6], np.int32), 0.0)
    core.masks(7, 2)  # too late
    core.ring.write(KIND_PLAN, np.asarray([8], np.int32), 0.0)
    assert core.come(waiting(7, 1, 2)) == {1: 1}
    got, words = core.records.read(0.0, 0.0)
    assert (got, words.tolist()) == (kind, [5, 6])
    got, words = core.records.read(0.0, 0.0)
    assert (got, words.tolist()) == (KIND_PLAN, [8])


def test_masks_of_another_step_are_dropped(core):
    core.masks(6, 1)
    core.masks(7, 1)
    assert core.come(waiting(7, 1)) == {1: 1}
    core.masks(7, 1)
    assert core.records.read(0.0, 0.0) is None


def test_a_control_request_waits_until_the_step_has_its_masks(core):
    core.ring.write(KIND_CONTROL, encode_control(DumpStacks(9)), 0.0)
    core.masks(7, 1)
    core.ring.write(KIND_PLAN, NOTHING, 0.0)
    assert core.come(waiting(7, 1)) == {1: 1}
    assert [core.records.read(0.0, 0.0)[0] for _ in range(2)] == [KIND_CONTROL, KIND_PLAN]


def test_masks_for_rows_that_wait_for_none_are_the_cores_mistake(core):
    core.masks(7, 1, 3)
    with pytest.raises(RuntimeError, match="rows \\[3\\] of step 7"):
        core.come(waiting(7, 1))


# ------------------------------------------------------------------------------------------------------------ control
@pytest.fixture
def serving() -> Iterator[tuple[Core, CoreToWorkers, Worker]]:
    core, core_link = Core(), CoreToWorkers(1)
    fds = [os.dup(fd) for fd in core.ring.fds(0)]
    worker = Worker(msgspec.structs.replace(worker_template(), control_address=core_link.address, plan_ring_fds=fds))
    yield core, core_link, worker
    worker.link.close()
    worker.reader.close()
    core.close()
    core_link.close()


def answers(serving, *requests: DumpStacks) -> list[ControlReply]:
    core, core_link, worker = serving
    for request in requests:
        core.ring.write(KIND_CONTROL, encode_control(request), 0.0)
    core.ring.write(KIND_SHUTDOWN, NOTHING, 0.0)
    worker._serve(None)
    replies = []
    while len(replies) < len(requests):
        assert core_link.sockets()[0].poll(10_000)
        replies += [message for _, message in core_link.receive()]
    return replies


def test_a_serving_worker_says_its_stacks(serving):
    first, second = answers(serving, DumpStacks(3), DumpStacks(4))
    assert (first.rank, first.id, first.error, second.id) == (0, 3, "", 4)
    assert "MainThread" in first.payload.decode() and "in _serve" in first.payload.decode()


def test_a_request_that_fails_is_answered_and_the_worker_goes_on(serving, monkeypatch):
    def fails() -> str:
        raise OSError("no stacks today")

    monkeypatch.setattr(worker_module, "stacks", fails)
    first, second = answers(serving, DumpStacks(3), DumpStacks(4))
    assert first.error == second.error == "OSError: no stacks today" and first.payload == b""
