"""EncoderGraphs: an encoder's layers as captured graphs, for steps of up to 2,048 tokens; longer steps run eagerly.

A graph is of a padded number of tokens. Its inputs are copied to buffers of its own: ids, positions, types and the rows'
bounds, of which there is room for the most rows; rows that a step does not have are empty, and tokens behind the last row are
padding; its results are not read. A size is run eagerly, padded, when it is first met, and captured then, so a step's result
is the same whether it was replayed or not. Several ranks capture nothing: each would have to capture at the same step.
"""

import logging
from collections.abc import Callable

import torch

from quire.workers.capture import captured

log = logging.getLogger("quire.workers")

MOST_TOKENS = 2048
SIZES = (16, 32, 64, *range(128, MOST_TOKENS + 1, 128))
Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


class EncoderGraphs:
    """run: the layers, of ids, positions, types or None, and bounds (encoder.EncoderBody)."""

    def __init__(self, run: Body, max_tokens: int, max_rows: int, has_types: bool, device: torch.device) -> None:
        self.sizes = [size for size in SIZES if size <= max(max_tokens, SIZES[0])]

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        most = self.sizes[-1]
        self._run, self._ids, self._positions = run, ints(most), ints(most)
        self._types, self._has_types = ints(most) if has_types else None, False
        self._bounds = ints(max_rows + 1)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # by size, with the hidden states it leaves

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, bounds: torch.Tensor
    ) -> torch.Tensor | None:
        """The hidden states [T, H] of a step, which the next one overwrites; None: it must run eagerly."""
        tokens, rows = len(ids), len(bounds) - 1
        size = next((size for size in self.sizes if tokens <= size), None)
        if size is None or not tokens or rows >= len(self._bounds):
            return None
        self._ids[:tokens].copy_(ids)
        self._positions[:tokens].copy_(positions)
        self._bounds[: rows + 1].copy_(bounds)
        self._bounds[rows + 1 :].copy_(bounds[rows:].expand(len(self._bounds) - rows - 1))
        self._take_types(types, tokens)
        if size in self._graphs:
            graph, hidden = self._graphs[size]
            graph.replay()
            return hidden[:tokens]
        hidden = self._padded(size)
        self._capture(size)
        return hidden[:tokens]

    def _take_types(self, types: torch.Tensor | None, tokens: int) -> None:
        if self._types is None:
            return
        if types is not None:
            self._types[:tokens].copy_(types)
        elif self._has_types:
            self._types.zero_()
        self._has_types = types is not None

    def _padded(self, size: int) -> torch.Tensor:
        types = None if self._types is None else self._types[:size]
        return self._run(self._ids[:size], self._positions[:size], types, self._bounds)

    def _capture(self, size: int) -> None:
        kept: list[torch.Tensor] = []
        try:
            graph = captured(lambda: kept.append(self._padded(size)), self._pool)
        except torch.OutOfMemoryError:
            log.warning("no memory is left for graphs: steps of an encoder run eagerly")
            self.sizes = []
            return
        self._graphs[size] = graph, kept[0]
