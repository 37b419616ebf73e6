"""EncoderCache: which rows of the workers' encoder cache hold the embeddings of which item. No I/O.

Rows are given out one by one, so that none are lost between items. The embeddings of an item stay until their rows are needed,
the least recently read ones first. They cannot be given up while a sequence is between two chunks that read them, nor before
the last step that reads them has returned.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

Digest = bytes


@dataclass(eq=False, slots=True)
class Entry:
    rows: np.ndarray  # int32 [tokens of the item]
    last_step: int = 0  # that reads or writes them
    holders: set[object] = field(default_factory=set)  # sequences that have read a part


class EncoderCache:
    """num_rows: tokens of items that the cache has room for; 0: the model takes text alone."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)  # the first num_free of them
        self._num_free = num_rows
        self._entries: OrderedDict[Digest, Entry] = OrderedDict()  # least recently read first
        self.returned = 0  # the last step that has returned

    def find(self, digest: Digest) -> Entry | None:
        return self._entries.get(digest)

    def allocate(self, digest: Digest, count: int, step: int) -> np.ndarray | None:
        """Rows for an item that is encoded before `step`, int32 [count]; None if too many are in use."""
        if self._num_free < count and not self._evict(count - self._num_free):
            return None
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._entries[digest] = Entry(rows, step)
        return rows

    def _evict(self, count: int) -> bool:
        """Give up the entries that were not read for longest, until `count` rows are free; False, and none, if too few are."""
        found, chosen = 0, []
        for digest, entry in self._entries.items():
            if found >= count:
                break
            if not entry.holders and entry.last_step <= self.returned:
                found += len(entry.rows)
                chosen.append(digest)
        if found < count:
            return False
        for digest in chosen:
            rows = self._entries.pop(digest).rows
            self._free[self._num_free : self._num_free + len(rows)] = rows
            self._num_free += len(rows)
        return True

    def read(self, digest: Digest, step: int, holder: object, is_last: bool) -> np.ndarray:
        """A step reads an item's rows, for a sequence that reads more of it later, unless this is the last time."""
        entry = self._entries[digest]
        self._entries.move_to_end(digest)
        entry.last_step = max(entry.last_step, step)
        if is_last:
            entry.holders.discard(holder)
        else:
            entry.holders.add(holder)
        return entry.rows

    def hold(self, digest: Digest, holder: object) -> None:
        """Keep an item's rows until the holder has read them for the last time."""
        self._entries[digest].holders.add(holder)

    def let_go(self, holder: object) -> None:
        """The sequence computes nothing more for now."""
        for entry in self._entries.values():
            entry.holders.discard(holder)

    def forget_all(self) -> None:
        """The workers are gone, and their memory with them."""
        self._entries.clear()
        self._free = np.arange(self.num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_rows

    def check(self) -> None:
        """Assert that each row is free or of one item."""
        used = [row for entry in self._entries.values() for row in entry.rows.tolist()]
        assert sorted([*self._free[: self._num_free].tolist(), *used]) == list(range(self.num_rows)), "a row was lost"
