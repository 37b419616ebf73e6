"""MaskArea: memory for masks that no record carries: given out, read where it is, and given out again when nobody reads it."""

import os
import random
from functools import partial

import numpy as np
import pytest

from quire.ipc.step.mask_area import MaskArea
from quire.ipc.step.masks import area_records, decode_masks
from quire.ipc.step.plan_ring import KIND_MASK, PlanReader, PlanRing, RingCorrupt

WIDTH = 8


class Readers:
    """How far they have given the ring back."""

    position = 0

    def __call__(self) -> int:
        return self.position


def make(num_words: int) -> tuple[MaskArea, Readers]:
    readers = Readers()
    return MaskArea(memoryview(bytearray(4 * num_words)), readers), readers


def test_memory_is_free_when_nobody_refers_to_it():
    area, _ = make(10 * WIDTH)
    first, second = area.take(6, WIDTH), area.take(4, WIDTH)
    assert first.shape == (6, WIDTH) and area.take(1, WIDTH) is None
    first[:], second[:] = 1, 2
    assert (first == 1).all() and (second == 2).all()
    row = second[3:]
    del first, second
    assert area.place_of(area.take(6, WIDTH)) == 0
    assert area.take(7, WIDTH) is None  # a row of the second is still referred to
    del row
    assert area.place_of(area.take(10, WIDTH)) == 0
    assert area.take(11, WIDTH) is None


def test_what_a_record_has_named_is_free_when_all_readers_have_given_it_back():
    area, readers = make(10 * WIDTH)
    masks = area.take(6, WIDTH)
    area.named(area.place_of(masks), 30)
    del masks
    assert area.take(6, WIDTH) is None
    readers.position = 29
    assert area.take(6, WIDTH) is None
    readers.position = 30
    assert area.take(6, WIDTH) is not None


def test_memory_goes_round():
    area, readers = make(10 * WIDTH)
    held = []
    for position, n, place in ((1, 4, 0), (2, 4, 4), (3, 3, None), (4, 3, 0), (5, 1, 3), (6, 1, None)):
        masks = area.take(n, WIDTH)
        assert (masks is None) == (place is None)
        if masks is not None:
            assert area.place_of(masks) == place * WIDTH
            area.named(place * WIDTH, position)
            held.append(masks)
        elif position == 3:
            readers.position = 1
            held.pop(0)


def test_only_masks_that_lie_there_side_by_side_have_a_place():
    area, _ = make(10 * WIDTH)
    area.take(2, WIDTH)
    masks = area.take(4, WIDTH)
    assert area.place_of(masks[1:3]) == area.place_of(masks) + WIDTH
    assert area.place_of(masks[:, : WIDTH - 1]) is None
    assert area.place_of(masks[[0, 2]]) is None
    assert area.place_of(np.zeros((2, WIDTH), np.int32)) is None


def lagging(seen: list, until: int) -> bool:
    """As the event of a copy that takes some records."""
    return len(seen) >= until


def test_what_readers_see_does_not_change_before_they_have_read_on():
    """Masks of random numbers of rows, placed while there is room; a reader that lags, and holds what it has read."""
    rng = random.Random(5)
    ring = PlanRing.create(1 << 10, 1, 64 * WIDTH)
    reader = PlanReader.attach([os.dup(fd) for fd in ring.fds(0)])
    sent, num_placed, unread, is_done = 0, 0, [], []
    for _ in range(4000):
        if rng.random() < 0.5 and len(unread) < 20:
            n = rng.randint(1, 30)
            masks = ring.area.take(n, WIDTH)
            if masks is not None:
                sent, num_placed = sent + 1, num_placed + 1
                masks[:] = sent
                place = ring.area.place_of(masks)
                for parts in area_records(sent, np.arange(n, dtype=np.int32), place, WIDTH):
                    ring.write_parts(KIND_MASK, parts, 0.0)
                ring.area.named(place, ring.position)
                unread.append((sent, n))
        elif (record := reader.read(0.0)) is not None:
            number, n = unread.pop(0)
            come = decode_masks(record[1], reader.area)
            assert come.masks.shape == (n, WIDTH) and (come.masks == number).all()
            is_done.append((come.masks, number))
            reader.hold(partial(lagging, is_done, len(is_done) + 3))
        for masks, number in is_done[-3:]:
            assert (masks == number).all()
    assert num_placed > 500
    reader.close()
    ring.close()


@pytest.mark.parametrize("place,width", [(-1, 4), (0, 0), (5, 4), (2**31 - 1, 4)])
def test_masks_that_are_not_all_there_are_no_masks(place, width):
    (parts,) = area_records(1, np.arange(2, dtype=np.int32), place, width)
    words = np.concatenate([part.reshape(-1) for part in parts])
    with pytest.raises(RingCorrupt, match="not in an area of 12"):
        decode_masks(words, np.zeros(12, np.int32))
