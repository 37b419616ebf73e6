"""PlanRing: the shared-memory ring that carries plans from the core to every worker. One writer, N readers that read all.

The memory is memfds, passed to the child by descriptor: they have no names, so a crash leaves nothing behind. They are sealed
against shrinking, so that no process can make another one fault, and only the writer can map the ring writable.

    ring, page 0     magic, capacity in units | published                        (int64 words, | starts a cache line)
    ring, then       records: {sequence number int64, kind int32, length int32} words[length], padded to units of 16 bytes
    ring, the rest   the area that records may refer to (mask_area.py)
    reader's page    magic, position, sleeping                                   (one memfd per reader)

Positions count units and never wrap. A record is contiguous: if it would cross the end, a filler takes the rest. It also does
where little is held and a lap was used: so the same pages serve again, and memory does not grow to the whole ring. The writer
stores a record first and `published` last; a reader reads only below `published`, so it cannot mistake a payload for a header.
The store order is kept by x86's memory model and, elsewhere, by the lock in `fence`.
"""

import fcntl
import math
import mmap
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from quire.ipc.step.mask_area import MaskArea

KIND_PLAN = 1
KIND_MASK = 2
KIND_SHUTDOWN = 3
KIND_CONTROL = 4
KIND_ITEM = 5
_KIND_FILLER = 0

_RING_MAGIC = 0x474E_4952_4552_4951
_READER_MAGIC = 0x4452_4552_4552_4951
_PAGE = 4096
_UNIT_WORDS = 4  # a unit is 16 bytes: one record header
_Q_MAGIC, _Q_CAPACITY, _Q_PUBLISHED = 0, 1, 8
_Q_POSITION, _Q_SLEEPING = 1, 2  # in a reader's page
_F_SEAL_FUTURE_WRITE = 0x10  # from <linux/fcntl.h>; in Python's fcntl since 3.13
_LAP = 1 << 16  # units, 1 MiB: of a ring from which readers take records in time, no more is ever touched
_MAX_SLEEP_S = 1.0  # a sleeping reader checks at least this often, whatever the doorbell says
_FULL_SLEEP_S = 50e-6
_HELD_SLEEP_S = 1e-3  # the same for a reader that holds records: the writer may wait for their room


class RingFull(Exception):
    """A reader has not made room in time."""


class RingCorrupt(Exception):
    """The shared memory holds data that no correct peer writes."""


def make_fence() -> Callable[[], None]:
    """A full memory barrier, ~60 ns: between a store and a later load of another word (sleeping flag against data).

    Releasing and acquiring a lock are atomic read-modify-writes. Each owner needs its own: it is not thread-safe.
    """
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


def make_shared_memory(name: str, size: int) -> int:
    """A sealed memfd of `size` bytes, zeroed. Not inherited unless passed on by descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def make_doorbell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def drain_doorbell(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)


def poll_ms(seconds: float) -> int:
    """Seconds as milliseconds for poll, rounded up so that a short wait does not become a busy loop."""
    return math.ceil(min(max(seconds, 0.0), _MAX_SLEEP_S) * 1000)


def adopt(fds: list[int], count: int, what: str) -> None:
    """Check the descriptors that a child got, and stop its own children from inheriting them."""
    if len(fds) != count:
        raise ValueError(f"a {what} has {count} descriptors, got {len(fds)}")
    for fd in fds:
        os.set_inheritable(fd, False)


def _map(fd: int, size: int, writable: bool = True) -> memoryview:
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)))


class PlanRing:
    """The writer's end. One thread."""

    def __init__(self, fd: int, readers: list[int], doorbells: list[int], capacity: int) -> None:
        self._fd, self._readers, self._doorbells, self._capacity = fd, readers, doorbells, capacity
        memory = _map(fd, os.fstat(fd).st_size)
        records, area = memory[_PAGE : _PAGE + 16 * capacity], memory[_PAGE + 16 * capacity :]
        self._q = memory[:_PAGE].cast("q")
        self._headers = records.cast("q")
        self._words = np.frombuffer(records, np.int32)
        self._pages = [_map(reader, _PAGE).cast("q") for reader in readers]
        self._bells = list(zip(self._pages, doorbells, strict=True))
        self._fence = make_fence()
        self._head = 0  # units written
        self._tail = 0  # units that all readers had given back when last checked
        self._sequence = 0
        pages = self._pages
        self.area = MaskArea(area, lambda: min(page[_Q_POSITION] for page in pages)) if area.nbytes else None

    @classmethod
    def create(cls, capacity_words: int, num_readers: int, area_words: int = 0) -> "PlanRing":
        """A ring of at least `capacity_words` int32 words, of which one record may take half (see `max_record_words`), and an
        area of at least `area_words`."""
        if capacity_words < 1 or num_readers < 1:
            raise ValueError(f"no plan ring of {capacity_words} words and {num_readers} readers")
        pages = -(-max(capacity_words, 2 * _UNIT_WORDS) * 4 // _PAGE)
        capacity = pages * _PAGE // 16
        readers = [make_shared_memory("quire-plan-reader", _PAGE) for _ in range(num_readers)]
        ring_fd = make_shared_memory("quire-plan", _PAGE + 16 * capacity + -(-area_words * 4 // _PAGE) * _PAGE)
        ring = cls(ring_fd, readers, [make_doorbell() for _ in readers], capacity)
        ring._q[_Q_CAPACITY], ring._q[_Q_MAGIC] = capacity, _RING_MAGIC
        for page in ring._pages:
            page[_Q_MAGIC] = _READER_MAGIC
        with suppress(OSError):  # fails before Linux 5.1: a reader could then write to the ring, but a correct one does not
            fcntl.fcntl(ring_fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        for fd in (ring_fd, *readers):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        return ring

    @property
    def max_record_words(self) -> int:
        """The longest record: half the ring, so that it fits an empty ring even with a filler before it."""
        return (self._capacity // 2 - 1) * _UNIT_WORDS

    @property
    def position(self) -> int:
        """The position behind the last record."""
        return self._head

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of records that the slowest reader has not given back."""
        return 16 * (self._head - min(page[_Q_POSITION] for page in self._pages))

    def fds(self, reader: int) -> list[int]:
        """Descriptors for `PlanReader.attach` in the child: pass them on with Child.configure or Popen(pass_fds=...)."""
        return [self._fd, self._readers[reader], self._doorbells[reader]]

    def write(self, kind: int, words: np.ndarray, timeout_s: float) -> None:
        """Append one record (int32, 1-D) for every reader and wake those that sleep.

        Raises RingFull if a reader has not made room after timeout_s, ValueError for a record that can never fit.
        """
        self.write_parts(kind, (words,), timeout_s)

    def write_parts(self, kind: int, parts: Sequence[np.ndarray], timeout_s: float) -> None:
        """Like `write`, for one record of these parts, one after the other, of any shape; they are copied only once."""
        length = sum(part.size for part in parts)
        units = 1 + (length + _UNIT_WORDS - 1) // _UNIT_WORDS
        if units > self._capacity // 2 or kind <= _KIND_FILLER:
            raise ValueError(
                f"a record of kind {kind} and {length} words: kind must be positive, words at most {self.max_record_words}"
            )
        offset = self._head % self._capacity
        skip = self._capacity - offset if offset + units > self._capacity or self._ends_lap(offset, units) else 0
        if self._head + skip + units - self._tail > self._capacity:
            self._wait_for_room(skip + units, timeout_s)
        if skip:
            self._put_header(offset, _KIND_FILLER, (skip - 1) * _UNIT_WORDS)
            offset = 0
        at = (offset + 1) * _UNIT_WORDS
        for part in parts:
            self._words[at : at + part.size].reshape(part.shape)[...] = part
            at += part.size
        self._put_header(offset, kind, length)
        self._head += skip + units
        self._fence()
        self._q[_Q_PUBLISHED] = self._head
        self._fence()  # publish before reading the flags; a reader raises its flag before it reads `published`
        for page, doorbell in self._bells:
            if page[_Q_SLEEPING]:
                os.eventfd_write(doorbell, 1)

    def _ends_lap(self, offset: int, units: int) -> bool:
        """Whether a record had better begin at the ring's first page: there is room, and enough for several more like it."""
        if offset < _LAP:
            return False
        self._look_at_readers()
        return self._head - self._tail <= offset // 4 and 4 * units <= offset

    def _put_header(self, offset: int, kind: int, length: int) -> None:
        self._headers[2 * offset + 1] = kind | length << 32
        self._headers[2 * offset] = self._sequence
        self._sequence += 1

    def _look_at_readers(self) -> list[int]:
        """The readers' positions. Raises RingCorrupt."""
        positions = [page[_Q_POSITION] for page in self._pages]
        if not all(self._tail <= p <= self._head for p in positions):
            raise RingCorrupt(f"a reader's position is outside the ring: {positions}")
        self._tail = min(positions)
        return positions

    def _wait_for_room(self, units: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            positions = self._look_at_readers()
            if self._head + units - self._tail <= self._capacity:
                return
            if time.monotonic() >= deadline:
                raise RingFull(f"reader {positions.index(self._tail)} has not made room for {timeout_s:.3g} s")
            time.sleep(_FULL_SLEEP_S)

    def close(self) -> None:
        """Release descriptors and memory. May be called again; no other method may be called after it."""
        if self._fd < 0:
            return
        for fd in (self._fd, *self._readers, *self._doorbells):
            os.close(fd)
        self._fd = -1
        self.area = None
        del self._q, self._headers, self._words, self._pages, self._bells  # unmaps, and closes the maps' own descriptors

    def __repr__(self) -> str:
        return f"PlanRing({len(self._pages)} readers, {self._head - self._tail} of {self._capacity} units held)"


class PlanReader:
    """A reader's end, in a worker. One thread."""

    def __init__(self, fds: list[int], capacity: int) -> None:
        self._fds, self._capacity = fds, capacity
        ring, reader, self._doorbell = fds
        memory = _map(ring, os.fstat(ring).st_size, writable=False)
        self._q = memory[:_PAGE].cast("q")
        self._headers = memory[_PAGE : _PAGE + 16 * capacity].cast("q")
        self.memory = np.frombuffer(memory[_PAGE:], np.int32)  # page aligned: records, and the area that they refer to
        self._words, self.area = self.memory[: 4 * capacity], self.memory[4 * capacity :]
        self._page = _map(reader, _PAGE).cast("q")
        self._fence = make_fence()
        self._poll = select.poll()
        self._poll.register(self._doorbell, select.POLLIN)
        self._last = 0  # position of the record last returned
        self._next = 0  # position after it
        self._held: deque[tuple[int, Callable[[], bool]]] = deque()  # (position, is_done) of held records, the oldest first
        self._sequence = 0

    @classmethod
    def attach(cls, fds: list[int]) -> "PlanReader":
        """The ring of `PlanRing.fds(reader)`, once. Raises RingCorrupt if the descriptors are not a plan ring's."""
        adopt(fds, 3, "plan ring")
        ring, reader, _ = fds
        size = os.fstat(ring).st_size
        if size < 2 * _PAGE or os.fstat(reader).st_size != _PAGE:
            raise RingCorrupt("this is no plan ring")
        magic, capacity = _map(ring, _PAGE, writable=False).cast("q")[:2]
        if (magic, _map(reader, _PAGE).cast("q")[_Q_MAGIC]) != (_RING_MAGIC, _READER_MAGIC) or size < _PAGE + 16 * capacity:
            raise RingCorrupt("this is no plan ring")
        return cls(fds, capacity)

    def fileno(self) -> int:
        """The doorbell's descriptor, for a poller; it rings only while armed."""
        return self._doorbell

    def read(self, timeout_s: float, spin_s: float = 0.0) -> tuple[int, np.ndarray] | None:
        """The next record as (kind, int32 words), or None after timeout_s. Spins for spin_s before it sleeps.

        The words are a read-only view of the ring. They are valid until the next call, which gives their room back to the
        writer, or as long as they are held. Raises RingCorrupt.
        """
        while True:
            position = self._next
            self._give_back()
            published = self._q[_Q_PUBLISHED]
            if published == position:
                published = self._wait(timeout_s, spin_s)
                if published == position:
                    return None
            self._fence()
            kind, words = self._record(position, published)
            if kind != _KIND_FILLER:
                return kind, words

    def hold(self, is_done: Callable[[], bool]) -> None:
        """Hold the record last read, and later ones, until is_done() returns True: `read` calls it, also while it waits.

        The writer waits for the room of held records, so is_done() must not depend on the writer's progress.
        """
        self._held.append((self._last, is_done))

    def _give_back(self) -> None:
        """Publish to the writer how far we have read, up to the first record that is still held."""
        held = self._held
        while held and held[0][1]():
            held.popleft()
        self._page[_Q_POSITION] = held[0][0] if held else self._next

    def _record(self, position: int, published: int) -> tuple[int, np.ndarray]:
        ahead = published - position
        offset = position % self._capacity
        sequence, word = self._headers[2 * offset], self._headers[2 * offset + 1]
        kind, length = word & 0xFFFFFFFF, word >> 32
        units = 1 + (length + _UNIT_WORDS - 1) // _UNIT_WORDS
        if not 0 < ahead <= self._capacity:
            raise RingCorrupt(f"published position {published} does not follow {position}")
        if sequence != self._sequence:
            raise RingCorrupt(f"record {self._sequence} bears sequence number {sequence}")
        if length < 0 or units > min(ahead, self._capacity - offset):
            raise RingCorrupt(f"record {sequence} of {length} words goes beyond what is published")
        self._sequence = sequence + 1
        self._last, self._next = position, position + units
        at = (offset + 1) * _UNIT_WORDS
        return kind, self._words[at : at + length]

    def _wait(self, timeout_s: float, spin_s: float) -> int:
        """Wait for a record; returns the published position, which is still our position after a time-out."""
        q, position = self._q, self._next
        now = time.monotonic()
        deadline, spin_until = now + timeout_s, now + min(spin_s, timeout_s)
        while now < spin_until:
            for _ in range(20):
                if (published := q[_Q_PUBLISHED]) != position:
                    return published
            if self._held:
                self._give_back()
            now = time.monotonic()
        while now < deadline and self.arm():
            self._poll.poll(poll_ms(min(deadline - now, _HELD_SLEEP_S) if self._held else deadline - now))
            self.disarm()
            if q[_Q_PUBLISHED] != position:
                break
            now = time.monotonic()
        return q[_Q_PUBLISHED]

    def arm(self) -> bool:
        """Ask for the doorbell. False, and not armed, if a record is there. In an event loop: arm, poll, disarm, read(0)."""
        self._give_back()
        self._page[_Q_SLEEPING] = 1
        self._fence()
        if self._q[_Q_PUBLISHED] == self._next:
            return True
        self._page[_Q_SLEEPING] = 0
        return False

    def disarm(self) -> None:
        """Lower the flag and empty the doorbell."""
        self._page[_Q_SLEEPING] = 0
        drain_doorbell(self._doorbell)

    def close(self) -> None:
        """Release descriptors and memory; views that were returned stay valid. May be called again; no other method may be."""
        if not self._fds:
            return
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        del self._q, self._headers, self._words, self._page, self.memory, self.area
