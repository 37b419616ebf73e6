"""MaskArea: the part of a plan ring's memory in which masks are made, where workers read them: none is copied on the way.

A record on the ring (masks.py) says where its masks lie. The memory is used as a ring, too: each piece is taken behind the
last one, or at the beginning where the end is too near. A piece is free when nobody refers to its array any more and all
readers have given back the last record that named it. The threads that make masks take pieces, the core's loop names them;
where there is no room masks travel in records.
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
        self.is_used = weakref.ref(array)  # views of it refer to it
        self.position = 0  # of the ring, behind the last record that named it


class MaskArea:
    def __init__(self, memory: memoryview, given_back: Callable[[], int]) -> None:
        """memory: of int32, writable. given_back: the ring's position that all readers have given back."""
        self._memory, self._given_back = memory, given_back
        self._num_words = memory.nbytes // 4
        self._address = np.frombuffer(memory, np.int32).__array_interface__["data"][0]
        self._chunks: deque[_Chunk] = deque()  # the oldest first
        self._lock = threading.Lock()

    def take(self, n: int, width: int) -> np.ndarray | None:
        """int32 [n, width] to be filled, or None where there is no room; the caller's for as long as it is referred to."""
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
            return 0 if num_words <= self._num_words else None  # where it was a moment ago: that is in the caches
        first, behind = chunks[0].begin, chunks[-1].end
        if first < behind:
            if behind + num_words <= self._num_words:
                return behind
            behind = 0
        return behind if behind + num_words <= first else None

    def place_of(self, masks: np.ndarray) -> int | None:
        """The word where they begin, if they lie in here, one behind the other."""
        place = (masks.__array_interface__["data"][0] - self._address) // 4
        return place if 0 <= place < self._num_words and masks.flags.c_contiguous else None

    def named(self, place: int, position: int) -> None:
        """A record that ends at this position of the ring has named the masks there."""
        with self._lock:
            for chunk in reversed(self._chunks):  # it is one of the last
                if chunk.begin <= place < chunk.end:
                    chunk.position = position
                    return
