"""ModelItems: what a model's first stage holds of items: bytes that have come, the rows of embeddings, and the step's own rows.

    bytes of an item -> its turn in a plan's `encoder_runs` -> rows in the cache -> read by steps, at the places of `places`

The core owns the cache: it names the places of rows, and no row is read or written that it did not name. The bytes come in
pieces by the plan ring, before the plan that encodes them. Runs are on the stream of the steps, between two of them, so a
step reads what an earlier run has written.

The model's embedding and its first blocks are wrapped by `attach`; a step without items passes through both.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from quire.ipc.memory_plan import ItemSizes
from quire.ipc.messages.media import MediaItem
from quire.ipc.step.items import decode_piece, decode_runs
from quire.kernels.step.tables import StepBuffers
from quire.workers.capture import captured
from quire.workers.models.media.arriving import Arriving
from quire.workers.models.media.guarded import GuardedRuns
from quire.workers.models.media.sizes import run_elements
from quire.workers.models.media.spec import MediaSpec

if TYPE_CHECKING:
    from quire.workers.models.media.tower_graphs import TowerGraphs
    from quire.workers.models.transformers.tower import Tower  # imports transformers


class ModelItems:
    """num_rows: of the cache, which `allocate` makes."""

    def __init__(self, tower: "Tower", spec: MediaSpec, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self._spec, self.num_rows = spec, 0
        self._tower, self._hidden_size, self._dtype, self._device = tower, hidden_size, dtype, device
        self.rows = torch.empty(0, hidden_size * (1 + tower.num_added), dtype=dtype, device=device)
        self.guarded = GuardedRuns(self.rows.shape[1], dtype, device)
        self._arriving: dict[int, Arriving] = {}
        self._buffers: StepBuffers | None = None
        self._next: torch.Tensor | None = None  # int64 [n]: the cache's row of each prompt token of the next forward, or -1
        self._places: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # of the forward under way

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()

    @property
    def most_tokens(self) -> int:
        """The most of one run, but for an item that has more: the default cache has room for two of the largest items."""
        return max(self.num_rows // 2, 1)

    @property
    def run_bytes(self) -> int:
        """The most memory of a run, an estimate."""
        return self.sizes.run_bytes(self.num_rows, self.rows.element_size())

    @property
    def sizes(self) -> ItemSizes:
        return ItemSizes(sum(p.numel() for p in self._tower.parameters()), self.rows.shape[1], run_elements(self._spec))

    def allocate(self) -> None:
        """Memory for all rows; what was there is lost."""
        self.rows = torch.zeros(self.num_rows, self.rows.shape[1], dtype=self._dtype, device=self._device)

    def appliers(self, buffers: StepBuffers) -> dict[str, Callable[[np.ndarray], None]]:
        """Functions that apply a plan's sections about items, in this order, before the step's inputs are built."""
        self._buffers = buffers
        return {"encoder_runs": self._run, "places": self._place}

    # ------------------------------------------------------------------------------------------------------ encoding
    def take(self, words: np.ndarray) -> None:
        """A record of KIND_ITEM: a piece of an item's bytes, or that it is given up."""
        piece = decode_piece(words)
        if piece.item is not None:
            self._arriving[piece.number] = Arriving(piece.number, piece.item, self._device.type == "cuda")
        if piece.is_given_up:
            self._arriving.pop(piece.number, None)
        else:
            self._arriving[piece.number].take(piece)

    def _run(self, words: np.ndarray) -> None:
        runs = decode_runs(words)
        arrived = [self._arriving.pop(number) for number, _ in runs]
        assert not any(item.missing for item in arrived), "an item is encoded before all of its bytes are there"
        index = torch.from_numpy(np.concatenate([rows for _, rows in runs]).astype(np.int64))
        made = self.guarded.rows(self.encode, list(self._batches(arrived)))
        self.rows.index_copy_(0, self._moved(index), made)

    def _batches(self, arrived: list[Arriving]) -> Iterator[list[Arriving]]:
        """The items in runs that take no more memory than the largest item may."""
        batch, count = list[Arriving](), 0
        for item in arrived:
            if batch and (self._tower.takes_one or count + item.item.num_tokens > self.most_tokens):
                yield batch
                batch, count = [], 0
            batch.append(item)
            count += item.item.num_tokens
        yield batch

    @torch.inference_mode()
    def run_largest(self, *, graphs: bool = False) -> int:
        """Encode an item of as many tokens as one run may have; returns the bytes that it takes on a GPU. graphs: capture the
        encoder's graphs, too, which stay in memory."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tensors, sizes = self._tower.largest(self.most_tokens)
        self._tower({name: self._moved(x).to(self._dtype) for name, x in tensors.items()}, sizes)
        taken = torch.cuda.max_memory_allocated() - before
        if graphs:
            self._tower.capture(self.most_tokens, captured)
        return taken

    @property
    def graphs(self) -> "TowerGraphs | None":
        """The graphs of the encoder's runs, if some were captured."""
        return self._tower.graphs

    def encode(self, arrived: list[Arriving]) -> torch.Tensor:
        """The rows of all items, one after the other, in one run."""
        named = [item.tensors() for item in arrived]
        tensors: dict[str, torch.Tensor] = {}
        sizes: dict[str, torch.Tensor] = {}
        for name in named[0]:
            parts = [item[name] for item in named]
            if parts[0].dtype == torch.int64:
                sizes[name] = torch.cat(parts)
                continue
            on_device = (self._moved(part) for part in parts)
            pixels = (self._rescaled(part, item.item) for part, item in zip(on_device, arrived, strict=True))
            tensors[name] = torch.cat(_padded([self._tower.with_frames(part) for part in pixels])).to(self._dtype)
        return self._tower(tensors, sizes)

    def _rescaled(self, pixels: torch.Tensor, item: MediaItem) -> torch.Tensor:
        """Pixels in the floats that the encoder takes. Channels are the dimension before the last two, or, of flat patches, the
        first part of each."""
        if item.rescale is None or pixels.dtype != torch.uint8:
            return pixels
        scale, offset = (torch.tensor(values, dtype=torch.float32, device="cpu") for values in item.rescale)
        channels, shape = len(scale), pixels.shape
        if pixels.dim() == 2:
            flat = pixels.view(len(pixels), channels, -1).float()
        else:
            flat = pixels.view(-1, channels, shape[-1] * shape[-2]).float()
        return (flat * self._moved(scale)[:, None] + self._moved(offset)[:, None]).view(shape)

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the device; the copy does not wait."""
        if self._device.type == "cpu":
            return x
        x = x if x.is_pinned() else x.pin_memory()
        return x.to(self._device, non_blocking=True)

    # ----------------------------------------------------------------------------------------------------------- steps
    def _place(self, words: np.ndarray) -> None:
        if self._buffers is not None:
            self._buffers.see_ahead(words)
        rows = words["row"]
        self._next = self._moved(torch.from_numpy(rows.astype(np.int64))) if (rows >= 0).any() else None

    def put(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embeddings [T, H] of a forward's tokens, with the rows of items in their places. Called once a forward."""
        rows, self._next, self._places = self._next, None, None
        if rows is None:
            return hidden
        step = self._buffers
        assert step is not None
        first = step.query_start.index_select(0, step.num_decode_rows)  # prompts' tokens are behind those of decode rows
        tokens = first + torch.arange(len(rows), device=self._device)
        self._places = tokens, rows.clamp(min=0), (rows >= 0)[:, None]
        own = torch.where(self._places[2], self._read(0), hidden.index_select(0, tokens))
        return hidden.index_copy_(0, tokens, own)

    def without_items(self, ids: torch.Tensor, instead: int) -> torch.Tensor:
        """The ids [T] of the forward under way, with another one in the place of each that an item has."""
        if self._places is None:
            return ids
        tokens, _, is_row = self._places
        return ids.index_copy(0, tokens, ids.index_select(0, tokens).masked_fill(is_row[:, 0], instead))

    def add(self, residual: torch.Tensor, layer: int) -> None:
        """Add what items bring behind this layer to the residual [T, H]."""
        if self._places is not None:
            tokens, _, is_row = self._places
            residual.index_add_(0, tokens, self._read(1 + layer).mul_(is_row))

    def _read(self, part: int) -> torch.Tensor:
        assert self._places is not None
        columns = self.rows[:, part * self._hidden_size : (part + 1) * self._hidden_size]
        return columns.index_select(0, self._places[1])

    def attach(self, decoder: Any) -> None:
        """Wrap a Decoder's embedding, the blocks behind which rows are added, and inputs of layers by ids, where an item's
        tokens count as padding."""
        decoder.__dict__["_begin"] = _Begin(decoder.__dict__["_begin"], self)
        for layer in range(self._tower.num_added):
            decoder.blocks[layer] = _Block(decoder.blocks[layer], layer, self)
        if (inputs_of := decoder.__dict__.get("inputs_of")) is not None:
            pad = self._spec.pad_token_id
            decoder.__dict__["inputs_of"] = lambda ids, hidden: inputs_of(self.without_items(ids, pad), hidden)


def _padded(images: list[torch.Tensor]) -> list[torch.Tensor]:
    """Images [n, C, H, W] with zeros to the right and below, so that all have one size; other tensors as they are."""
    if images[0].dim() < 4 or len({image.shape[-2:] for image in images}) == 1:
        return images
    height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
    return [functional.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2])) for image in images]


class _Begin:
    """A model's embedding, with rows of items."""

    def __init__(self, begin: Callable[[torch.Tensor], torch.Tensor], items: ModelItems):
        self._begin, self._items = begin, items

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._items.put(self._begin(ids))


class _Block:
    """A block, with what items add behind it."""

    def __init__(self, block: Callable[..., tuple[Any, torch.Tensor]], layer: int, items: ModelItems):
        self._block, self._layer, self._items = block, layer, items

    def __call__(self, *args: Any) -> tuple[Any, torch.Tensor]:
        x, residual = self._block(*args)
        self._items.add(residual, self._layer)
        return x, residual
