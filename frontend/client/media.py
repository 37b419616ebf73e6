"""Media of requests, as clients hold them: items with their places in a prompt, sent to the engine when it asks for them.

An item's tensors leave only then: an engine that has its embeddings, or the blocks that were computed from them, never asks.
"""

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy, LinkDown
from quire.ipc.messages.frontend import TokenInputs
from quire.ipc.messages.media import MediaData, MediaGone, MediaItem, MediaWanted

_RETRY_S = 0.02  # when the link is busy


class Item(Protocol):
    """An item of a request (frontend/media/items.py)."""

    kind: str
    digest: bytes

    @property
    def num_tokens(self) -> int: ...
    def wire(self, start: int) -> MediaItem: ...
    async def tensors(self) -> list[bytes]: ...


class PlacedItem(NamedTuple):
    """start: its first placeholder's place in the prompt."""

    item: Item
    start: int


def wire(items: Sequence[PlacedItem]) -> list[MediaItem] | None:
    """The items as they travel in TokenInputs."""
    return [each.item.wire(each.start) for each in items] or None


def num_tokens(items: Sequence[PlacedItem]) -> dict[str, int]:
    """How many tokens of a prompt they are, by kind."""
    numbers: dict[str, int] = {}
    for each in items:
        numbers[each.item.kind] = numbers.get(each.item.kind, 0) + each.item.num_tokens
    return numbers


def routing_ids(inputs: TokenInputs) -> np.ndarray:
    """A prompt's ids, int32 [n], for a router: those of an item's placeholders come from its digest, since all images have the
    same placeholder, and an engine has cached blocks of its own images alone."""
    ids = np.frombuffer(inputs.token_ids, np.int32)
    if inputs.items:
        ids = ids.copy()
        for item in inputs.items:
            (mark,) = struct.unpack_from("<I", item.digest)
            for start, count in item.spans:
                ids[start : start + count] = mark >> 1
    return ids


class TensorSender:
    """Answers the engine's MediaWanted, in tasks of its own. requests: those that run, by id."""

    def __init__(self, requests: Mapping[int, Any]) -> None:
        self._requests = requests
        self._tasks: set[asyncio.Task[None]] = set()

    def wanted(self, message: MediaWanted, link: FrontendToCore) -> None:
        task = asyncio.get_running_loop().create_task(self._send(message, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, wanted: MediaWanted, link: FrontendToCore) -> None:
        state = self._requests.get(wanted.request_id)
        items: Sequence[PlacedItem] = getattr(state, "items", ())
        if not 0 <= wanted.index < len(items):
            return  # the request has ended
        item, named = items[wanted.index].item, (wanted.epoch, wanted.request_id, wanted.index)
        tensors: list[bytes] = []
        answer: MediaData | MediaGone
        try:
            tensors = await item.tensors()
            answer = MediaData(*named, item.digest)
        except Exception as error:  # whatever it is, the request fails, and not the link
            answer = MediaGone(*named, str(error) if isinstance(error, ValueError) else "the image cannot be read again")
        while wanted.request_id in self._requests and link.epoch == wanted.epoch:
            try:
                if isinstance(answer, MediaData):
                    return link.send_media(answer, tensors)
                return link.send(answer)
            except LinkBusy:
                await asyncio.sleep(_RETRY_S)
            except LinkDown:
                return
