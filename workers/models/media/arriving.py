"""Arriving: the tensors of an item, put together from the pieces that come by the plan ring. Owned by ModelItems."""

import torch

from quire.ipc.messages.media import MediaItem
from quire.ipc.step.items import ItemPiece

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}


class Arriving:
    """An item while its bytes come. number: on the plan ring. data: all of its tensors, one after the other."""

    def __init__(self, number: int, item: MediaItem, is_pinned: bool):
        self.number, self.item = number, item
        self.data = torch.empty(item.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.missing = item.num_bytes

    def take(self, piece: ItemPiece) -> None:
        self.data[piece.offset : piece.offset + len(piece.data)].numpy()[:] = piece.data
        self.missing -= len(piece.data)

    def tensors(self) -> dict[str, torch.Tensor]:
        found, at = {}, 0
        for tensor in self.item.tensors:
            part = self.data[at : at + tensor.num_bytes].view(_DTYPES[tensor.dtype])
            found[tensor.name] = part.view(tensor.shape)
            at += tensor.num_bytes
        return found
