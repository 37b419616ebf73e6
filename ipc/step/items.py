"""Items on the plan ring: their bytes, in records of KIND_ITEM, and the section `encoder_runs` of a plan.

An item is named by a number that the core draws for each time that it sends one. A record holds a piece of its bytes; the first
one also has the MediaItem. All records of an item come before the plan that encodes it, or before one that gives it up.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from quire.ipc.messages.media import MediaItem

PIECE_BYTES = 1 << 20  # of an item, in one record
GIVEN_UP = -1
_HEAD = 4  # words: number, offset in bytes or GIVEN_UP, bytes of the piece, bytes of the MediaItem
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MediaItem).decode


class ItemPiece(NamedTuple):
    """data: uint8, from byte `offset` of the item's tensors on. item: of the first piece."""

    number: int
    offset: int
    data: np.ndarray
    item: MediaItem | None = None

    @property
    def is_given_up(self) -> bool:
        return self.offset == GIVEN_UP


def encode_piece(piece: ItemPiece) -> tuple[np.ndarray, ...]:
    """The record's parts, int32, one after the other."""
    item = b"" if piece.item is None else _encode(piece.item)
    head = np.array([piece.number, piece.offset, len(piece.data), len(item)], np.int32)
    rest = len(piece.data) % 4
    last = np.frombuffer(piece.data[len(piece.data) - rest :].tobytes() + bytes(-rest % 4), np.int32)
    whole = np.ascontiguousarray(piece.data[: len(piece.data) - rest]).view(np.int32)
    return head, np.frombuffer(item + bytes(-len(item) % 4), np.int32), whole, last


def decode_piece(words: np.ndarray) -> ItemPiece:
    """A record of KIND_ITEM; its data is a view."""
    number, offset, num_bytes, item_bytes = words[:_HEAD].tolist()
    rest = words[_HEAD:].view(np.uint8)
    at = item_bytes + -item_bytes % 4
    item = _decode(rest[:item_bytes].tobytes()) if item_bytes else None
    return ItemPiece(number, offset, rest[at : at + num_bytes], item)


class Run(NamedTuple):
    """An item to encode, and the rows of the cache that its embeddings go to, int32 [tokens]."""

    number: int
    rows: np.ndarray


def encode_runs(runs: Iterable[Run]) -> np.ndarray:
    """The words of the section `encoder_runs`."""
    return np.concatenate([np.concatenate((np.array([run.number, len(run.rows)], np.int32), run.rows)) for run in runs])


def decode_runs(words: np.ndarray) -> list[Run]:
    """The runs of a section; rows are views into `words`."""
    runs, at = [], 0
    while at < len(words):
        number, count = words[at : at + 2].tolist()
        runs.append(Run(number, words[at + 2 : at + 2 + count]))
        at += 2 + count
    return runs
