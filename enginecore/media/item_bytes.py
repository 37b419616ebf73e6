"""ItemBytes: items with tensors on their way to the workers: asked for, being sent, or there and not encoded yet. No I/O.

    wanted -> MediaWanted to a frontend -> MediaData -> pieces on the plan ring -> ready -> encoded by a plan: no longer here

Bytes are bounded: an item is asked for only while it has room beside the others, or if nothing else is here. A sequence that
runs may take the room of one that does not, and an earlier one that of a later one, so that the first of those that run always
goes on. An item that has lost its room is asked for again once it is needed. One thread; Items (items.py) owns it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quire.enginecore.media.prompt_items import PromptItems
from quire.ipc.messages.media import MediaItem
from quire.ipc.step.items import GIVEN_UP, PIECE_BYTES, ItemPiece

Digest = bytes
NO_BYTES = np.zeros(0, np.uint8)


class Sequence(Protocol):
    """The fields of a sequence that are read (scheduling/sequence.py)."""

    owner: int
    request_id: int
    prompt: np.ndarray
    items: PromptItems | None
    slot: int
    order: tuple[int, int]

    @property
    def is_finished(self) -> bool: ...


class Question(NamedTuple):
    """MediaWanted, to be sent to a frontend."""

    owner: int
    request_id: int
    number: int  # in TokenInputs.items


@dataclass(eq=False, slots=True)
class Coming:
    """An item on its way. number: its name on the ring."""

    item: MediaItem
    number: int
    asked_at: float
    wanted_by: dict[Sequence, int] = field(default_factory=dict)  # and the item's index there
    asked: Sequence | None = None  # its frontend was asked; None: the item has come
    data: list[bytes] = field(default_factory=list)  # of its tensors, until all is sent
    sent: int = 0  # bytes

    @property
    def is_ready(self) -> bool:
        return self.asked is None and self.sent == self.item.num_bytes

    @property
    def rank(self) -> tuple[bool, tuple[int, int]]:
        """The lowest comes first."""
        return min(map(_rank, self.wanted_by), default=(True, (1 << 62, 0)))


def _rank(seq: Sequence) -> tuple[bool, tuple[int, int]]:
    return seq.slot < 0, seq.order


class ItemBytes:
    """most_bytes: of all items here, unless one alone has more."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._coming: dict[Digest, Coming] = {}
        self._num_ever = 0
        self.questions: list[Question] = []
        self.wake: Callable[[], None] = lambda: None  # called when there is a question
        self.changed: list[Digest] = []  # items that have become ready, or are no longer here
        self._given_up: list[int] = []  # numbers, until the workers are told

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def has_given_up(self) -> bool:
        """Whether the workers must be told of items that they need not keep."""
        return bool(self._given_up)

    def find(self, digest: Digest) -> Coming | None:
        return self._coming.get(digest)

    def want(self, seq: Sequence, index: int, item: MediaItem, now: float) -> bool:
        """Whether the item is here or was asked for; False: there is no room for it now."""
        coming = self._coming.get(item.digest)
        if coming is None:
            if not self._make_room(seq, item.num_bytes):
                return False
            self._num_ever += 1
            coming = self._coming[item.digest] = Coming(item, self._num_ever, now)
            self.num_bytes += item.num_bytes
            self._ask(coming, seq, index)
        coming.wanted_by[seq] = index
        return True

    def _ask(self, coming: Coming, seq: Sequence, index: int) -> None:
        coming.asked = seq
        self.questions.append(Question(seq.owner, seq.request_id, index))
        self.wake()

    def _make_room(self, seq: Sequence, num_bytes: int) -> bool:
        if not self._coming or self.num_bytes + num_bytes <= self._most_bytes:
            return True
        later = sorted((c for c in self._coming.values() if c.rank > _rank(seq)), key=lambda c: c.rank)
        if self.num_bytes - sum(c.item.num_bytes for c in later) + num_bytes > max(self._most_bytes, num_bytes):
            return False
        while later and self.num_bytes + num_bytes > self._most_bytes:
            self.give_up(later.pop().item.digest)
        return True

    def take(self, owner: int, digest: Digest, tensors: list[bytes]) -> str | None:
        """The bytes of an item have come from a frontend; what is wrong with them, or None. Bytes that this frontend was not
        asked for are dropped."""
        coming = self._coming.get(digest)
        if coming is None or coming.asked is None or coming.asked.owner != owner:
            return None
        if [len(tensor) for tensor in tensors] != [tensor.num_bytes for tensor in coming.item.tensors]:
            return "an item's bytes do not fit its tensors"
        coming.asked, coming.data, coming.sent = None, tensors, 0
        return None

    def pieces(self) -> Iterator[ItemPiece]:
        """The records for the workers, in order; a piece counts as sent once the next one is asked for."""
        while self._given_up:
            yield ItemPiece(self._given_up[-1], GIVEN_UP, NO_BYTES)
            self._given_up.pop()
        for coming in list(self._coming.values()):
            if coming.asked is None and coming.data:
                yield from self._pieces_of(coming)

    def _pieces_of(self, coming: Coming) -> Iterator[ItemPiece]:
        begin = 0
        for data in coming.data:
            whole = np.frombuffer(data, np.uint8)
            while coming.sent < begin + len(whole):
                at = coming.sent - begin
                part = whole[at : at + PIECE_BYTES]
                yield ItemPiece(coming.number, coming.sent, part, None if coming.sent else coming.item)
                coming.sent += len(part)
            begin += len(whole)
        coming.data = []
        self.changed.append(coming.item.digest)

    def encoded(self, digest: Digest) -> int:
        """The item is encoded by the next plan; returns its number."""
        return self._drop(digest).number

    def give_up(self, digest: Digest) -> None:
        """Drop an item."""
        coming = self._drop(digest)
        if coming.sent:
            self._given_up.append(coming.number)

    def _drop(self, digest: Digest) -> Coming:
        coming = self._coming.pop(digest)
        self.num_bytes -= coming.item.num_bytes
        self.changed.append(digest)
        return coming

    def drop_ended(self) -> None:
        """Items that only ended sequences want are dropped; what was asked of an ended one's frontend is asked of another's."""
        for digest, coming in list(self._coming.items()):
            for seq in [s for s in coming.wanted_by if s.is_finished]:
                del coming.wanted_by[seq]
            if not coming.wanted_by:
                self.give_up(digest)
            elif coming.asked is not None and coming.asked not in coming.wanted_by:
                self._ask(coming, *next(iter(coming.wanted_by.items())))

    def overdue(self, before: float) -> list[Sequence]:
        """Sequences that want items which were asked for before this time and have not come."""
        late = (c for c in self._coming.values() if c.asked is not None and c.asked_at < before)
        return [seq for coming in late for seq in coming.wanted_by]

    def forget_all(self) -> None:
        """The workers are gone; what they had must be sent again."""
        for digest in list(self._coming):
            self._drop(digest)
        self._given_up.clear()
        self.questions.clear()

    def check(self) -> None:
        """Assert that all bytes are accounted for."""
        assert self.num_bytes == sum(c.item.num_bytes for c in self._coming.values())
        assert self.num_bytes <= self._most_bytes or len(self._coming) == 1
