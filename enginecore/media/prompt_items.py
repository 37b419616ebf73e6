"""PromptItems: where the embeddings and the positions of a prompt's tokens come from, if the prompt has items. No I/O.

Made once by intake, which checks what a frontend says; read by the block hasher, the scheduler's chunks and the plan. Index
ranges count the prompt's tokens. An item's extent runs from the first token of its first span to the last of its last one;
within it, tokens outside all spans are ordinary.
"""

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from quire.ipc.media import (
    DIGEST_BYTES,
    MAX_AXES,
    MAX_CHANNELS,
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_SPANS,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
)
from quire.ipc.messages.media import MediaInfo, MediaItem


class Extent(NamedTuple):
    """An item's tokens."""

    begin: int
    end: int
    item: MediaItem


class PromptItems:
    """The items of one prompt, which must have no problem (`problem_with`). are_whole: a span's tokens see each other, so that
    a chunk must not end within one.

    A prefix hit may end within a span. Its blocks were written by a chunk that had the whole span, and the item's digest, which
    their hashes hold, says what else is in it; the rest of the span, computed later, sees the same keys.
    """

    def __init__(self, items: Sequence[MediaItem], are_whole: bool = False):
        self._whole = [(begin, begin + length) for item in items for begin, length in item.spans] if are_whole else []
        self._whole_ends = [end for _, end in self._whole]
        self.extents = [Extent(i.spans[0][0], i.spans[-1][0] + i.spans[-1][1], i) for i in items]
        self._ends = [extent.end for extent in self.extents]
        self._has_positions = any(item.positions for item in items)
        advances = ((e.item.advance - (e.end - e.begin)) if e.item.positions else 0 for e in self.extents)
        self.delta = sum(advances)  # a token's rotary position less its position, behind all items

    def __len__(self) -> int:
        return len(self.extents)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, Extent]]:
        """(index, extent) of the items that have tokens in [begin, end)."""
        for index in range(bisect.bisect_right(self._ends, begin), len(self.extents)):
            if self.extents[index].begin >= end:
                return
            yield index, self.extents[index]

    def whole_span(self, token: int) -> tuple[int, int]:
        """(first token, last token + 1) of those that are computed in one step with this one."""
        at = bisect.bisect_right(self._whole_ends, token)
        if at < len(self._whole) and self._whole[at][0] <= token:
            return self._whole[at]
        return token, token + 1

    def last_visible(self, begin: int, end: int) -> np.ndarray:
        """The last tokens that tokens [begin, end) see, if they are behind these, else 0; int32 [end - begin]."""
        found = np.zeros(end - begin, np.int32)
        for first, last in self._whole[bisect.bisect_right(self._whole_ends, begin) :]:
            if first >= end:
                break
            found[max(first - begin, 0) : last - begin] = last - 1
        return found

    def hashed(self, begin: int, end: int) -> bytes:
        """The part of a block's hash for items that have tokens in [begin, end): digests, and how far each has begun."""
        own = self.within(begin, end)
        parts = (extent.item.digest + (begin - extent.begin).to_bytes(8, "little", signed=True) for _, extent in own)
        return b"".join(parts)

    @property
    def first(self) -> int:
        """The first token of the first item."""
        return self.extents[0].begin

    def needs_places(self, begin: int, end: int) -> bool:
        """Whether some tokens in [begin, end) have other embeddings or rotary positions than their ids and numbers say."""
        if self._has_positions and end > self.first:
            return True
        return next(self.within(begin, end), None) is not None

    def rows_of(self, index: int) -> np.ndarray:
        """The tokens that an item's rows go to, int32, in the order of the rows."""
        spans = self.extents[index].item.spans
        return np.concatenate([np.arange(begin, begin + length, dtype=np.int32) for begin, length in spans])

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Rotary positions int32 [MAX_AXES, end - begin]; `end` may be behind the prompt."""
        if not self._has_positions:
            return np.broadcast_to(np.arange(begin, end, dtype=np.int32), (MAX_AXES, end - begin))
        last, known = self._ends[-1], self._positions
        behind = np.arange(max(begin, last), max(end, last), dtype=np.int32) + self.delta
        return np.concatenate([known[:, begin : min(end, last)], np.broadcast_to(behind, (MAX_AXES, len(behind)))], 1)

    @cached_property
    def _positions(self) -> np.ndarray:
        """int32 [MAX_AXES, end of the last item]"""
        found = np.empty((MAX_AXES, self._ends[-1]), np.int32)
        at = now = 0
        for begin, end, item in self.extents:
            found[:, at:begin] = np.arange(now, now + begin - at)
            now += begin - at
            own = np.asarray(item.positions, np.int32) if item.positions else np.arange(end - begin)[None]
            found[:, begin:end] = now
            found[: len(own) if len(own) > 1 else MAX_AXES, begin:end] += own
            now += item.advance if item.positions else end - begin
            at = end
        return found


# ------------------------------------------------------------------------------------------------------------- checks
def problem_with(items: Sequence[MediaItem], prompt: np.ndarray, info: MediaInfo | None, max_positions: int) -> str | None:
    """The fault of a prompt's items, as a text for its user; None if there is none."""
    if info is None:
        return "the model takes text alone"
    if not 0 < len(items) <= MAX_ITEMS:
        return f"a request may have 1 to {MAX_ITEMS} items"
    end = 0
    for item in items:
        if item.kind not in info.kinds:
            return f"the model does not take {item.kind[:20]!r}"
        if problem := _problem_with_spans(item, end, prompt) or _problem_with_tensors(item) or _problem_with_positions(item):
            return problem
        if item.num_tokens > info.max_item_tokens:
            return (
                f"an item of {item.num_tokens} tokens is larger than the encoder cache, which has {info.max_item_tokens}: "
                "a smaller one works, or a larger --encoder-cache-tokens"
            )
        longest = max(length for _, length in item.spans)
        if 0 < info.max_whole_span < longest:
            return (
                f"an item has {longest} tokens that one step computes together, which are at most {info.max_whole_span} here: "
                "a smaller one works, or a larger --max-num-batched-tokens and --encoder-cache-tokens"
            )
        end = item.spans[-1][0] + item.spans[-1][1]
    made = PromptItems(items)
    if made.positions(0, end).max() >= max_positions:
        return "the items' positions are beyond the model's"
    return None


def _problem_with_spans(item: MediaItem, end: int, prompt: np.ndarray) -> str | None:
    if len(item.digest) != DIGEST_BYTES or not 0 < len(item.spans) <= MAX_SPANS:
        return "an item lacks its digest or its place in the prompt"
    place = -1
    for begin, length in item.spans:
        if not end <= begin < begin + length <= len(prompt):
            return "the items' places in the prompt must be in order, and may not overlap"
        own = prompt[begin : begin + length]
        place = int(own[0]) if place < 0 else place
        if (own != place).any():
            return "an item's places must hold its placeholder alone"
        end = begin + length
    return None


def _problem_with_tensors(item: MediaItem) -> str | None:
    if not 0 < len(item.tensors) <= MAX_TENSORS:
        return f"an item has 1 to {MAX_TENSORS} tensors"
    for tensor in item.tensors:
        if len(tensor.shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 31 for size in tensor.shape):
            return "an item's tensor has a shape that is not supported"
        if tensor.num_bytes > MAX_TENSOR_BYTES:
            return f"an item's tensor may have at most {MAX_TENSOR_BYTES} bytes"
    if not 0 < item.num_bytes < 1 << 31:
        return "an item's tensors must have 1 byte to 2 GiB"
    if item.rescale is not None and not 0 < len(item.rescale[0]) == len(item.rescale[1]) <= MAX_CHANNELS:
        return "an item's scale and offset must be of as many channels"
    return None


def _problem_with_positions(item: MediaItem) -> str | None:
    if not item.positions:
        return None
    length = item.spans[-1][0] + item.spans[-1][1] - item.spans[0][0]
    if len(item.positions) > MAX_AXES or any(len(axis) != length for axis in item.positions):
        return "an item's positions must be of all of its tokens"
    if min(map(min, item.positions)) < 0 or max(map(max, item.positions)) >= 1 << 24 or not 0 <= item.advance <= length:
        return "an item's positions are out of range"
    return None
