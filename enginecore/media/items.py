"""Items: what the scheduler asks about the items of prompts: how far a chunk may go, and what its tokens read. No I/O.

A chunk ends before an item without rows. Rows are given to an item when a chunk comes to it and its bytes are at the workers;
the plan of that step has the run which encodes it (`take_runs`). A sequence waits aside until its first item has come; one that
runs keeps its slot. Items that lie in cached blocks are neither asked for nor encoded, since no chunk comes to them.
"""

import time
from collections.abc import Callable

import numpy as np

from quire.enginecore.media.encoder_cache import EncoderCache
from quire.enginecore.media.item_bytes import ItemBytes, Sequence
from quire.enginecore.media.prompt_items import Extent
from quire.ipc.step.items import Run
from quire.ipc.step.plan import DTYPES

NO_ROOM = b"no room"  # what sequences wait for if their items have none
PLACE = DTYPES["places"]


class Items:
    """num_rows: of the encoder cache; most_bytes: of items on their way to the workers."""

    def __init__(self, num_rows: int = 0, most_bytes: int = 0, clock: Callable[[], float] = time.monotonic):
        self.cache = EncoderCache(num_rows)
        self.bytes = ItemBytes(most_bytes)
        self._runs: list[Run] = []
        self._unsent: list[bytes] = []  # digests of their items; their rows are held until then
        self._clock = clock
        self._has_waiting = False

    # -------------------------------------------------------------------------------------------------------- waiting
    def waits_for(self, seq: Sequence, start: int) -> bytes | None:
        """The key that a sequence which would start at this token has to wait for, aside, until it is among `take_resolved`."""
        if seq.items is None:
            return None
        index, extent = next(seq.items.within(start, len(seq.prompt)), (0, None))
        if extent is None or self._is_there(seq, index, extent):
            return None
        self._has_waiting = True
        return extent.item.digest if self.bytes.find(extent.item.digest) is not None else NO_ROOM

    def _is_there(self, seq: Sequence, index: int, extent: Extent) -> bool:
        """Whether the item has rows, or could have some; else it is asked for."""
        digest = extent.item.digest
        if self.cache.find(digest) is not None:
            return True
        coming = self.bytes.find(digest)
        if coming is None or seq not in coming.wanted_by:
            self.bytes.want(seq, index, extent.item, self._clock())
        return coming is not None and coming.is_ready

    def take_resolved(self) -> list[bytes]:
        """Those of `waits_for` that sequences need not wait for any longer."""
        changed, self.bytes.changed = self.bytes.changed, []
        if not changed or not self._has_waiting:
            return []
        return [*changed, NO_ROOM]

    # ---------------------------------------------------------------------------------------------------------- chunks
    def cut(self, seq: Sequence, start: int, length: int, step: int) -> int:
        """The tokens of a chunk of `length` tokens that can be computed in this step."""
        if seq.items is None:
            return length
        for index, extent in seq.items.within(start, start + length):
            if not self._stands(seq, index, extent, step):
                return max(extent.begin - start, 0)
        ahead = next(seq.items.within(start + length, len(seq.prompt)), None)
        if ahead is not None:
            self._is_there(seq, *ahead)  # asked for ahead
        return length

    def together(self, seq: Sequence, start: int) -> int:
        """The tokens, from `start` on, that one step must compute together: 1, or up to the end of a span."""
        return 1 if seq.items is None else seq.items.whole_span(start)[1] - start

    def whole(self, seq: Sequence, start: int, length: int) -> int:
        """The most of `length` tokens with which a chunk does not end within a span."""
        if seq.items is None or length <= 0:
            return length
        first, end = seq.items.whole_span(start + length - 1)
        return length if end == start + length else max(first - start, 0)

    def can_start(self, seq: Sequence, start: int, step: int) -> bool:
        """Whether the token at `start` has an embedding in this step."""
        if seq.items is None:
            return True
        inside = next(seq.items.within(start, start + 1), None)
        return inside is None or self._stands(seq, *inside, step)

    def _stands(self, seq: Sequence, index: int, extent: Extent, step: int) -> bool:
        """Whether the item has rows; it gets some if its bytes are at the workers and there is room."""
        digest = extent.item.digest
        if self.cache.find(digest) is not None:
            return True
        if not self._is_there(seq, index, extent):
            return False
        coming = self.bytes.find(digest)
        assert coming is not None
        rows = self.cache.allocate(digest, extent.item.num_tokens, step, coming.number)
        if rows is None:
            return False
        self._runs.append(Run(self.bytes.encoded(digest), rows))
        self._unsent.append(digest)
        self.cache.hold(digest, self)
        return True

    def take_runs(self, step: int) -> list[Run]:
        """The runs that have not been put into a plan: that of this step must have them."""
        for digest in self._unsent:
            self.cache.read(digest, step, self, is_last=True)
        runs, self._runs, self._unsent = self._runs, [], []
        return runs

    def places(self, seq: Sequence, start: int, end: int, step: int) -> np.ndarray | None:
        """The chunk's places, [end - start] of PLACE: rows that the step reads. None: embeddings and positions are plain."""
        if seq.items is None or not seq.items.needs_places(start, end):
            return None
        found = np.zeros(end - start, PLACE)
        found["row"] = -1
        for axis, positions in enumerate(seq.items.positions(start, end)):
            found[f"rotary_{axis}"] = positions
        found["last_visible"] = seq.items.last_visible(start, end)
        for index, extent in seq.items.within(start, end):
            rows = self.cache.read(extent.item.digest, step, seq, extent.end <= end, max(start, extent.begin))
            tokens = seq.items.rows_of(index)
            inside = (tokens >= start) & (tokens < end)
            found["row"][tokens[inside] - start] = rows[inside]
        return found

    def leaves(self, seq: Sequence) -> None:
        """The sequence computes nothing of its prompt for now."""
        if seq.items is not None:
            self.cache.let_go(seq)

    def forget_all(self) -> None:
        """The workers are gone, with all rows and bytes."""
        self._runs, self._unsent = [], []
        self.cache.forget_all()
        self.bytes.forget_all()

    def check(self) -> None:
        self.cache.check()
        self.bytes.check()
