"""The plan ring: order and content through wrap-around, a slow reader, sleeping and waking, corrupt memory."""

import mmap
import os
import select
import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc.step import plan_ring
from quire.ipc.step.plan_ring import KIND_MASK, KIND_PLAN, KIND_SHUTDOWN, PlanReader, PlanRing, RingCorrupt, RingFull


class Ring:
    """A ring and its readers in one process."""

    def __init__(self, capacity_words: int = 1024, num_readers: int = 1) -> None:
        self.writer = PlanRing.create(capacity_words, num_readers)
        self.readers = [PlanReader.attach([os.dup(fd) for fd in self.writer.fds(r)]) for r in range(num_readers)]

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()


def words(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.int32)


def test_record_comes_out_as_it_went_in():
    with Ring() as ring:
        for kind, n in ((KIND_PLAN, 5), (KIND_MASK, 0), (KIND_SHUTDOWN, 1)):
            ring.writer.write(kind, words(n), 0.0)
        for kind, n in ((KIND_PLAN, 5), (KIND_MASK, 0), (KIND_SHUTDOWN, 1)):
            got, data = ring.readers[0].read(0.0)
            assert (got, data.tolist(), data.dtype) == (kind, list(range(n)), np.int32)
        assert ring.readers[0].read(0.0) is None


def test_parts_of_any_shape_follow_each_other():
    with Ring() as ring:
        wide = words(40).reshape(4, 10)
        for part in (wide[:, :9], wide[1:3, 2:], wide[:0], wide.T):
            ring.writer.write_parts(KIND_MASK, (words(3), part), 0.0)
            assert ring.readers[0].read(0.0)[1].tolist() == [0, 1, 2, *part.flatten().tolist()]


def test_a_ring_from_which_records_are_taken_in_time_uses_few_of_its_pages():
    """Even if some are still held; and all of it, where they are not taken in time."""
    with Ring(1 << 20) as ring:
        [reader] = ring.readers
        places = []
        for number in range(900):
            ring.writer.write(KIND_PLAN, words(1000, number), 0.0)
            if number % 3 < 2:
                continue
            for behind in (2, 1, 0):
                kind, data = reader.read(0.0)
                assert (kind, data.tolist()) == (KIND_PLAN, words(1000, number - behind).tolist())
                places.append((data.__array_interface__["data"][0] - reader.memory.__array_interface__["data"][0]) // 16)
        assert len(set(places)) < len(places) / 3 and max(places) < 1.02 * plan_ring._LAP < 64 * max(places)
        for number in range(1000):
            ring.writer.write(KIND_PLAN, words(1000, number), 0.0)
        assert [reader.read(0.0)[1][0] for _ in range(1000)] == list(range(1000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_every_reader_sees_every_record_in_order_through_short_laps(steps):
    with mock.patch.object(plan_ring, "_LAP", 40):
        test_every_reader_sees_every_record_in_order_through_wrap_around.hypothesis.inner_test(steps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 510), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_every_reader_sees_every_record_in_order_through_wrap_around(steps):
    """Each step writes one record, if there is room, and lets each reader read some; a list is the model."""
    with Ring(1024, num_readers=2) as ring:
        expected: list[list[tuple[int, int]]] = [[], []]
        for number, (length, *reads) in enumerate(steps):
            length = min(length, ring.writer.max_record_words)
            try:
                ring.writer.write(1 + number % 3, words(length, number), 0.0)
                for queue in expected:
                    queue.append((number, length))
            except RingFull:
                if not any(expected):  # then some reader holds its last record: reading on gives it back
                    assert [reader.read(0.0) for reader in ring.readers] == [None, None]
                    ring.writer.write(1 + number % 3, words(length, number), 0.0)
                    for queue in expected:
                        queue.append((number, length))
            for reader, queue, count in zip(ring.readers, expected, reads, strict=True):
                for _ in range(count):
                    record = reader.read(0.0)
                    if not queue:
                        assert record is None
                        continue
                    number_then, length_then = queue.pop(0)
                    assert record[0] == 1 + number_then % 3
                    assert record[1].tolist() == words(length_then, number_then).tolist()


def test_longest_record_fits_at_every_offset_once_the_ring_is_empty():
    with Ring(1024) as ring:
        longest = ring.writer.max_record_words
        for small in range(0, 1100, 3):
            ring.writer.write(KIND_MASK, words(small % 97), 0.0)
            assert ring.readers[0].read(0.0)[1].size == small % 97
            assert ring.readers[0].read(0.0) is None
            ring.writer.write(KIND_PLAN, words(longest), 0.0)
            assert (ring.readers[0].read(0.0)[1] == words(longest)).all()
            assert ring.readers[0].read(0.0) is None


def test_record_that_never_fits_is_refused():
    with Ring(1024) as ring:
        with pytest.raises(ValueError, match="at most"):
            ring.writer.write(KIND_PLAN, words(ring.writer.max_record_words + 1), 0.0)
        with pytest.raises(ValueError, match="kind"):
            ring.writer.write(0, words(1), 0.0)
        assert ring.readers[0].read(0.0) is None


def test_slow_reader_stops_the_writer_and_loses_nothing():
    with Ring(1024, num_readers=2) as ring:
        fast, slow = ring.readers
        written = 0
        with pytest.raises(RingFull, match="reader 1"):
            while True:
                ring.writer.write(KIND_PLAN, words(100, written), 0.01)
                written += 1
                fast.read(0.0)
        fast.read(0.0)
        assert written >= 8
        first = slow.read(0.0)[1]
        with pytest.raises(RingFull):  # the view that the reader holds is not overwritten
            ring.writer.write(KIND_PLAN, words(100, written), 0.0)
        assert first.tolist() == words(100, 0).tolist()
        assert [slow.read(0.0)[1][0] for _ in range(written - 1)] == list(range(1, written))
        assert slow.read(0.0) is None
        ring.writer.write(KIND_PLAN, words(100, written), 0.0)
        assert slow.read(0.0)[1][0] == fast.read(0.0)[1][0] == written


def test_writer_goes_on_when_a_reader_makes_room():
    with Ring(1024) as ring:
        with pytest.raises(RingFull):
            while True:
                ring.writer.write(KIND_PLAN, words(100), 0.0)
        ring.readers[0].read(0.0)
        reading = threading.Thread(target=ring.readers[0].read, args=(0.0,), name="test-reader")
        reading.start()
        ring.writer.write(KIND_PLAN, words(100), 20.0)
        reading.join()


# ------------------------------------------------------------------------------------------------------ held records
def test_a_held_record_and_what_follows_stay_until_it_is_done():
    with Ring(1024) as ring:
        (reader,), done = ring.readers, [False, False]
        ring.writer.write(KIND_PLAN, words(200, 0), 0.0)
        reader.read(0.0)  # not held
        ring.writer.write(KIND_MASK, words(300, 1), 0.0)
        first = reader.read(0.0)[1]
        reader.hold(lambda: done[0])
        ring.writer.write(KIND_MASK, words(200, 2), 0.0)
        second = reader.read(0.0)[1]
        reader.hold(lambda: done[1])
        ring.writer.write(KIND_PLAN, words(200, 3), 0.0)
        done[1] = True  # out of turn
        assert reader.read(0.0)[1].tolist() == words(200, 3).tolist()
        assert reader.read(0.0) is None
        for _ in range(3):
            with pytest.raises(RingFull):  # but for the first record's room, which is a little less
                ring.writer.write(KIND_PLAN, words(204, 4), 0.0)
            assert reader.read(0.0) is None
        assert (first.tolist(), second.tolist()) == (words(300, 1).tolist(), words(200, 2).tolist())
        done[0] = True
        assert reader.read(0.0) is None
        longest = words(ring.writer.max_record_words)
        ring.writer.write(KIND_PLAN, longest, 0.0)  # all of the ring is free again
        assert reader.read(0.0)[1].tolist() == longest.tolist()


@pytest.mark.parametrize("spin_s", [0.0, 20.0])
def test_a_reader_that_waits_for_more_gives_back_what_is_done_meanwhile(spin_s):
    """The writer waits for room, the reader for what the writer would write there: neither waits for ever."""
    with Ring(1024) as ring:
        (reader,), asked, got = ring.readers, [], []

        def is_done() -> bool:
            asked.append(True)
            return len(asked) > 5

        ring.writer.write(KIND_MASK, words(500), 0.0)
        reader.read(0.0)
        reader.hold(is_done)
        ring.writer.write(KIND_MASK, words(500, 1), 0.0)
        assert reader.read(0.0)[1].tolist() == words(500, 1).tolist()
        reading = threading.Thread(target=lambda: got.append(reader.read(20.0, spin_s)), name="test-reader")
        reading.start()
        ring.writer.write(KIND_PLAN, words(500, 7), 20.0)
        reading.join()
        assert got[0][1].tolist() == words(500, 7).tolist() and len(asked) == 6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.integers(0, 3)), max_size=60))
def test_what_is_held_is_never_overwritten(steps):
    """Each step writes a record if there is room, reads one, may hold it, and lets some of the held ones end in any order."""
    with Ring(1024) as ring:
        (reader,), held, numbers = ring.readers, {}, iter(range(1000))
        for number, (length, holds, ends) in enumerate(steps):
            for key in list(held)[ends : ends + 1]:
                del held[key]
            try:
                ring.writer.write(KIND_MASK, words(length, number), 0.0)
            except RingFull:
                assert held or reader._held
                assert reader.read(0.0) is None
                continue
            view, key = reader.read(0.0)[1], next(numbers)
            assert view.tolist() == words(length, number).tolist()
            if holds:
                held[key] = (view, words(length, number))
                reader.hold(lambda key=key: key not in held)
            for seen, wanted in held.values():
                assert (seen == wanted).all()
        held.clear()
        assert reader.read(0.0) is None
        ring.writer.write(KIND_PLAN, words(ring.writer.max_record_words), 0.0)


def test_views_cannot_be_written():
    with Ring() as ring:
        ring.writer.write(KIND_PLAN, words(4), 0.0)
        view = ring.readers[0].read(0.0)[1]
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def doorbell_rings(reader: PlanReader) -> bool:
    return bool(select.select([reader.fileno()], [], [], 0)[0])


def test_only_a_sleeping_reader_is_rung():
    with Ring(num_readers=2) as ring:
        awake, sleeper = ring.readers
        assert sleeper.arm()
        ring.writer.write(KIND_PLAN, words(1), 0.0)
        assert doorbell_rings(sleeper) and not doorbell_rings(awake)
        sleeper.disarm()
        assert not doorbell_rings(sleeper)
        assert sleeper.read(0.0) is not None
        ring.writer.write(KIND_PLAN, words(1), 0.0)
        assert not doorbell_rings(sleeper)
        assert not sleeper.arm()  # there is a record: no sleep
        ring.writer.write(KIND_PLAN, words(1), 0.0)
        assert not doorbell_rings(sleeper)


@pytest.mark.parametrize("spin_s", [0.0, 20.0])
def test_waiting_reader_gets_the_record_at_once(spin_s, monkeypatch):
    monkeypatch.setattr(plan_ring, "_MAX_SLEEP_S", 60.0)
    with Ring() as ring:
        got = []
        waiting = threading.Thread(
            target=lambda: got.append((ring.readers[0].read(20.0, spin_s), time.monotonic())), name="test-reader"
        )
        waiting.start()
        while not spin_s and not ring.writer._pages[0][2]:  # until it sleeps
            pass
        written = time.monotonic()
        ring.writer.write(KIND_PLAN, words(3), 0.0)
        waiting.join()
        (kind, data), at = got[0]
        assert (kind, data.tolist()) == (KIND_PLAN, [0, 1, 2])
        assert at - written < 15.0  # rung, not found at the end of a bounded sleep


def test_read_gives_up_after_its_time_out():
    with Ring() as ring:
        started = time.monotonic()
        assert ring.readers[0].read(0.05) is None
        assert ring.readers[0].read(0.05, spin_s=0.02) is None
        assert 0.1 <= time.monotonic() - started < 5


# ------------------------------------------------------------------------------------------------- corrupt memory
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1)), max_size=8),
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 300)),
)
def test_reader_of_corrupt_memory_raises_and_never_reads_beyond_it(scribbles, published):
    with Ring(1024) as ring:
        for n in (3, 0, 200, 7):
            ring.writer.write(KIND_PLAN, words(n), 0.0)
        for at, value in scribbles:
            ring.writer._headers[at] = value
        if published is not None:
            ring.writer._q[8] = published
        try:
            for _ in range(8):
                record = ring.readers[0].read(0.0)
                assert record is None or len(record[1]) <= 1024
        except RingCorrupt:
            pass


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, 5, "sequence number 5"), (1, KIND_PLAN | 500 << 32, "beyond"), (1, -1, "beyond")],
    ids=["sequence", "too long", "negative length"],
)
def test_torn_header_is_reported(at, value, message):
    with Ring() as ring:
        ring.writer.write(KIND_PLAN, words(3), 0.0)
        ring.writer._headers[at] = value
        with pytest.raises(RingCorrupt, match=message):
            ring.readers[0].read(0.0)


def test_payload_that_looks_like_headers_is_never_taken_for_one():
    """After a wrap the place of the next header holds old payload: here, of a record with the very number expected next."""
    with Ring(1024) as ring:
        for number in range(200):
            fake = np.tile(np.asarray([number + 1, 0, KIND_SHUTDOWN, 0], np.int32), 1 + number % 50)
            ring.writer.write(KIND_PLAN, fake, 0.0)
            assert ring.readers[0].read(0.0)[0] == KIND_PLAN
            assert ring.readers[0].read(0.0) is None


@pytest.mark.parametrize("position", [-1, 1, 2**62])
def test_writer_notices_a_readers_impossible_position(position):
    with Ring(1024) as ring:
        ring.writer.write(KIND_PLAN, words(0), 0.0)
        ring.readers[0].read(0.0)
        with pytest.raises((RingCorrupt, RingFull)) as caught:
            while True:
                ring.writer._pages[0][1] = position if position != 1 else ring.writer._head + 1
                ring.writer.write(KIND_PLAN, words(400), 0.0)
        assert caught.type is RingCorrupt


def test_attach_refuses_descriptors_of_something_else():
    with Ring() as ring, Ring() as other:
        ring_fd, page_fd, bell = ring.writer.fds(0)
        for fds in ([page_fd, page_fd, bell], [ring_fd, ring_fd, bell], [bell, page_fd, bell]):
            with pytest.raises(RingCorrupt):
                PlanReader.attach(fds)
        with pytest.raises(ValueError, match="3 descriptors"):
            PlanReader.attach(other.writer.fds(0)[:2])


def test_memory_cannot_shrink_or_be_mapped_writable_by_a_reader():
    with Ring() as ring:
        ring_fd, page_fd, _ = ring.writer.fds(0)
        for fd in (ring_fd, page_fd):
            with pytest.raises(OSError):
                os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(ring_fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_senseless_sizes_are_refused():
    for capacity, readers in ((0, 1), (100, 0)):
        with pytest.raises(ValueError, match="no plan ring"):
            PlanRing.create(capacity, readers)
