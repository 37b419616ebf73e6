"""MaskArea: the part of a plan ring's memory in which masks are made and from which workers read them, without a copy.

A record on the ring (masks.py) says where its masks lie. The memory is used as a ring, too: each chunk is taken behind the
last one, or at the beginning if there is too little room before the end. A chunk is free when its array has no references left
and all readers have given back the last record that refers to it. The threads that make masks take chunks, and the core's loop
refers to them in records; without room for a chunk, masks travel inside the records.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np


class _Chunk:
    __slots__ = ("begin", "end", "is_used", "position")

    def __init__(self, begin: int, array: np.ndarray) -> None:
        self.begin, self.end = begin, begin + array.size
        self.is_used = weakref.ref(array)  # dead once no view of it is left
        self.position = 0  # in the ring, behind the last record that refers to it


class MaskArea:
    def __init__(self, memory: memoryview, given_back: Callable[[], int]) -> None:
        """memory: int32, writable. given_back: returns the ring's position up to which all readers have given back records."""
        self._memory, self._given_back = memory, given_back
        self._num_words = memory.nbytes // 4
        self._address = np.frombuffer(memory, np.int32).__array_interface__["data"][0]
        self._chunks: deque[_Chunk] = deque()  # the oldest first
        self._lock = threading.Lock()

    def take(self, n: int, width: int) -> np.ndarray | None:
        """int32 [n, width] to be filled, or None without room; it belongs to the caller as long as it is referenced."""
        with self._lock:
            begin = self._room(n * width)
            if begin is None:
                return None
            array = np.frombuffer(self._memory, np.int32, n * width, 4 * begin)
            self._chunks.append(_Chunk(begin, array))
        return array.reshape(n, width)

    def _room(self, num_words: int) -> int | None:
        chunks, given_back = self._chunks, self._given_back()
        while chunks and chunks[0].is_used() is None and chunks[0].position <= given_back:
            chunks.popleft()
        if not chunks:
            return 0 if num_words <= self._num_words else None  # the memory used last, which is in the CPU's caches
        first, behind = chunks[0].begin, chunks[-1].end
        if first < behind:
            if behind + num_words <= self._num_words:
                return behind
            behind = 0
        return behind if behind + num_words <= first else None

    def place_of(self, masks: np.ndarray) -> int | None:
        """The word at which the masks begin, if they are contiguous in this area; None otherwise."""
        place = (masks.__array_interface__["data"][0] - self._address) // 4
        return place if 0 <= place < self._num_words and masks.flags.c_contiguous else None

    def named(self, place: int, position: int) -> None:
        """A record that ends at this position of the ring refers to the masks at `place`."""
        with self._lock:
            for chunk in reversed(self._chunks):  # it is one of the last
                if chunk.begin <= place < chunk.end:
                    chunk.position = position
                    return
