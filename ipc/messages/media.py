"""Media items of a prompt, and the messages that bring their tensors to the core. Parts of frontend.py's unions.

A request names its items in TokenInputs. Their tensors follow only when the core asks, because an item with cached embeddings
is not needed: MediaWanted goes to the frontend, which answers with MediaData and the tensors' bytes, one ZeroMQ frame a tensor
behind the message, or with MediaGone. The frontend keeps an item's tensors until its request has ended: the core may
ask again after a preemption, or when its workers were lost.
"""

from math import prod
from typing import Literal

from quire.ipc.media import ITEM_SIZES
from quire.ipc.messages.message import Message


class MediaTensor(Message, frozen=True):
    """An argument of the model's encoder. Its bytes are little-endian and dense."""

    name: str  # as `get_image_features` of the model names it
    dtype: Literal["uint8", "float32", "int64"]
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class MediaItem(Message, frozen=True):
    """A part of the prompt that gets its embeddings from an encoder. ipc/media.py has the bounds."""

    kind: str  # "image"
    digest: bytes  # 32 bytes: equal for items with equal embeddings only
    # (first token in the prompt, number of tokens), sorted and disjoint: the placeholders, to which the rows go in this order
    spans: list[tuple[int, int]]
    tensors: list[MediaTensor]  # in the order in which their bytes travel
    # rotary positions [axes][tokens], from 0, of all tokens from the first span's first to the last span's last; empty: plain
    positions: list[list[int]] = []
    advance: int = 0  # how far the rotary position advances over these tokens, if `positions` is not empty
    rescale: tuple[list[float], list[float]] | None = None  # (scale, offset) of each channel: pixel = uint8 * scale + offset

    @property
    def num_tokens(self) -> int:
        """Rows of embeddings."""
        return sum(length for _, length in self.spans)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


class MediaInfo(Message, frozen=True):
    """The media that a model takes beside text."""

    kinds: list[str]  # "image"
    max_item_tokens: int  # most rows of one item: those of the encoder cache
    # most tokens of a span of which all tokens see each other, so that one step computes it whole; 0: they see what is before
    max_whole_span: int = 0


# ------------------------------------------------------------------------------------------------- frontend -> core
class MediaData(Message, tag="media_data", frozen=True):
    """The tensors of an item that the core asked for. Their bytes are the frames behind this message, one a tensor."""

    epoch: int
    request_id: int
    index: int  # in TokenInputs.items
    digest: bytes
    tensors: list[bytes] = []  # empty on the wire; the link puts the frames here


class MediaGone(Message, tag="media_gone", frozen=True):
    """The frontend cannot make an item's tensors again: the request fails. reason: for its user."""

    epoch: int
    request_id: int
    index: int
    reason: str


# ------------------------------------------------------------------------------------------------- core -> frontend
class MediaWanted(Message, tag="media_wanted", frozen=True):
    """The core asks for the tensors of an item. It may ask for the same item again."""

    epoch: int
    request_id: int
    index: int
