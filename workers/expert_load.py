"""How many tokens each rank's experts get under expert parallelism: counted on the device.

All ranks of a stage route all tokens alike, so the first rank counts for all: routers add to a layer's counts while they route,
also in graphs, and between two steps the core asks for the sums (enginecore/expert_load.py). Padding is not counted.
"""

import msgspec
import numpy as np
import torch

from quire.ipc.messages.stats import ExpertTokens
from quire.workers.models.config import ModelConfig
from quire.workers.parallel import Parallel
from quire.workers.shard import even_split


class ExpertLoad:
    """The counts of a stage's experts, which are distributed over `size` ranks."""

    def __init__(self, size: int, device: torch.device):
        self._size, self._device = size, device
        self._layers: list[torch.Tensor] = []
        self._told: np.ndarray | None = None  # the counts at the last `take`
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tokens = self._rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_tokens = 0

    def new(self, num_experts: int) -> torch.Tensor:
        """A layer's counts, int32 [num_experts], which may wrap around."""
        self._layers.append(torch.zeros(num_experts, dtype=torch.int32, device=self._device))
        return self._layers[-1]

    def begin(self, tokens: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> None:
        """A step begins, padded to num_tokens. tokens, rows: its real numbers of these, int32 [1] each, on the device."""
        self._tokens, self._rows, self._num_tokens = tokens, rows, num_tokens

    def real_rows(self, num_rows: int) -> torch.Tensor:
        """int32 [1]: how many of a layer's num_rows rows are real. The last layer may compute only the rows' last tokens."""
        return self._tokens if num_rows == self._num_tokens else self._rows

    def take(self) -> bytes:
        """ExpertTokens, encoded, since the last call."""
        counts = self._copied().reshape(len(self._layers), -1)
        new = counts if self._told is None else counts - self._told  # int32, so it is right across a wraparound
        self._told = counts
        parts = [even_split(counts.shape[1], rank, self._size) for rank in range(self._size)]
        by_rank = np.stack([new[:, part.slice].sum(1, dtype=np.int64) for part in parts])
        return msgspec.msgpack.encode(ExpertTokens(by_rank.sum(1).tolist(), int(by_rank.max(0).sum())))

    def _copied(self) -> np.ndarray:
        """All layers' counts, read on a stream of its own, so that steps under way are not waited for."""
        if self._stream is None:
            return torch.cat(self._layers).numpy()
        with torch.cuda.stream(self._stream):
            return torch.cat(self._layers).cpu().numpy()


def expert_load_of(model: ModelConfig, parallel: Parallel) -> ExpertLoad | None:
    """The counts, on the first rank of each stage; None without expert parallelism or experts in this stage."""
    if not parallel.expert_parallel or parallel.size == 1 or parallel.rank:
        return None
    has_experts = any(layer.experts is not None for i, layer in enumerate(model.layers) if i in parallel.stage.layers)
    return ExpertLoad(parallel.size, parallel.device) if has_experts else None
