"""EncoderCache: which rows of the workers' encoder cache hold the embeddings of which item. No I/O.

Rows are given out one by one, so that none are lost between items. The embeddings of an item stay until their rows are needed,
the least recently read ones first. They cannot be given up while a sequence is between two chunks that read them, nor before
the last step that reads them has returned. An item that could not be encoded is taken out (`discard`), with the names of those
that have read its rows.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

Digest = bytes
SETTLED_STEPS = 32  # after so many steps no worker says any longer that it could not encode an item


@dataclass(eq=False, slots=True)
class Entry:
    rows: np.ndarray  # int32 [tokens of the item]
    number: int  # of the item on the plan ring
    run: int  # the step that begins with its encoding
    last_step: int  # that reads or writes them
    holders: set[object] = field(default_factory=set)  # sequences that have read a part
    readers: dict[object, int] = field(default_factory=dict)  # sequences that read it before it settled: their first token


class EncoderCache:
    """num_rows: tokens of items that the cache has room for; 0: the model takes text alone."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)  # the first num_free of them
        self._num_free = num_rows
        self._entries: OrderedDict[Digest, Entry] = OrderedDict()  # least recently read first
        self._discarded: list[Entry] = []  # with a step in flight
        self.returned = 0  # the last step that has returned

    def find(self, digest: Digest) -> Entry | None:
        return self._entries.get(digest)

    def allocate(self, digest: Digest, count: int, step: int, number: int = 0) -> np.ndarray | None:
        """Rows for an item that is encoded before `step`, int32 [count]; None if too many are in use. number: on the ring."""
        self._tidy_up()
        if self._num_free < count and not self._evict(count - self._num_free):
            return None
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._entries[digest] = Entry(rows, number, step, step)
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
            self._give_back(self._entries.pop(digest))
        return True

    def _give_back(self, entry: Entry) -> None:
        self._free[self._num_free : self._num_free + len(entry.rows)] = entry.rows
        self._num_free += len(entry.rows)

    def _tidy_up(self) -> None:
        for entry in self._entries.values():
            if entry.run + SETTLED_STEPS < self.returned:
                entry.readers.clear()
        for entry in [each for each in self._discarded if each.last_step <= self.returned]:
            self._discarded.remove(entry)
            self._give_back(entry)

    def discard(self, number: int) -> Entry | None:
        """The item of this number on the ring could not be encoded: it is here no longer. Its rows are free once the last step
        that reads them has returned. Returns its entry, or None if it is gone already."""
        digest = next((digest for digest, entry in self._entries.items() if entry.number == number), None)
        if digest is None:
            return None
        entry = self._entries.pop(digest)
        self._discarded.append(entry)
        return entry

    def read(self, digest: Digest, step: int, holder: object, is_last: bool, start: int | None = None) -> np.ndarray:
        """A step reads an item's rows, for a sequence that reads more of it later, unless this is the last time. start: the
        first token that is computed from them."""
        entry = self._entries[digest]
        self._entries.move_to_end(digest)
        entry.last_step = max(entry.last_step, step)
        if start is not None and step <= entry.run + SETTLED_STEPS:
            entry.readers.setdefault(holder, start)
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
        self._discarded.clear()
        self._free = np.arange(self.num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_rows

    def check(self) -> None:
        """Assert that each row is free or of one item."""
        used = [row for entry in (*self._entries.values(), *self._discarded) for row in entry.rows.tolist()]
        assert sorted([*self._free[: self._num_free].tolist(), *used]) == list(range(self.num_rows)), "a row was lost"
