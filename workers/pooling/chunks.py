"""ChunkPooler: one hidden state for each row of a decoder's step; a prompt may come in chunks.

LAST takes the last token's state. MEAN sums a chunk's states in float32 onto what earlier chunks have left in the row's slot.
CLS keeps the first token's there, and MAX the greatest element of all tokens so far. WEIGHTED_MEAN weighs a token by its place,
1, 2, ...; SQRT_MEAN divides a sum by the root of the number of tokens. A row's sum is formed in the order of its tokens,
whichever rows share the step.
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.pooling import PoolingType
from quire.kernels.step.tables import StepBuffers


class Chunks(NamedTuple):
    """Rows of a step that are pooled, with their chunks: int32 [n] each, on the host."""

    rows: np.ndarray  # of the step
    slots: np.ndarray
    starts: np.ndarray  # position of a chunk's first token
    lengths: np.ndarray
    flags: np.ndarray

    @classmethod
    def of_rows(cls, prefill: np.ndarray, rows: np.ndarray) -> "Chunks":
        """prefill: these rows of a plan's section; copied, as the plan's place in the ring is given back."""
        return cls(rows, *(prefill[name].copy() for name in ("slot", "start", "length", "flags")))

    def tokens(self, query_start: torch.Tensor) -> torch.Tensor:
        """int64 [all tokens of these chunks]: their indices among the step's tokens. query_start: each row's first."""
        within = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        rows = np.repeat(self.rows, self.lengths)
        index = torch.from_numpy(np.stack([rows, within]).astype(np.int64)).to(query_start.device)
        return query_start.index_select(0, index[0]).long() + index[1]

    def weights(self) -> np.ndarray:
        """float32 [all tokens of these chunks]: each token's place in its prompt, from 1 on."""
        within = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return (within + np.repeat(self.starts, self.lengths) + 1).astype(np.float32)


class ChunkPooler:
    """num_slots: with the dummy."""

    def __init__(self, pooling_type: PoolingType, num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._type = pooling_type
        self.needs_every_token = pooling_type != "LAST"
        self._kept = torch.zeros(num_slots if self.needs_every_token else 0, hidden_size, device=device)

    def take(
        self, hidden: torch.Tensor, chunks: Chunks, buffers: StepBuffers, *, has_every_token: bool, has_windows: bool
    ) -> torch.Tensor:
        """The rows' states so far, [n, H]: float32, or the model's dtype of LAST. hidden, has_every_token: as in Computed.
        has_windows: of the step's decode rows."""
        device = hidden.device
        rows = torch.from_numpy(chunks.rows.astype(np.int64)).to(device)
        if self._type == "LAST":
            if has_every_token:
                return hidden.index_select(0, buffers.query_start.index_select(0, rows + 1).long() - 1)
            samples = buffers.first_sample.index_select(0, rows).long() if has_windows else rows
            return hidden.index_select(0, samples)
        slots = torch.from_numpy(chunks.slots.astype(np.int64)).to(device)
        begins = torch.from_numpy(chunks.starts == 0).to(device)[:, None]
        kept = self._kept.index_select(0, slots)
        if self._type == "CLS":
            first = hidden.index_select(0, buffers.query_start.index_select(0, rows).long()).float()
            states = torch.where(begins, first, kept)
            self._kept.index_copy_(0, slots, states)
            return states
        states = hidden.index_select(0, chunks.tokens(buffers.query_start)).float()
        lengths = torch.from_numpy(chunks.lengths.astype(np.int64)).to(device)
        if self._type == "MAX":
            greatest = torch.segment_reduce(states, "max", lengths=lengths)
            greatest = torch.where(begins, greatest, torch.maximum(greatest, kept))
            self._kept.index_copy_(0, slots, greatest)
            return greatest
        if self._type == "WEIGHTED_MEAN":
            states *= torch.from_numpy(chunks.weights()).to(device)[:, None]
        sums = torch.segment_reduce(states, "sum", lengths=lengths) + torch.where(begins, 0.0, kept)
        self._kept.index_copy_(0, slots, sums)
        return sums / torch.from_numpy(self._divisors(chunks)).to(device)[:, None]

    def _divisors(self, chunks: Chunks) -> np.ndarray:
        """float32 [n]: what the sums of rows are divided by."""
        counts = (chunks.starts + chunks.lengths).astype(np.float32)
        match self._type:
            case "WEIGHTED_MEAN":
                return counts * (counts + 1) / 2
            case "SQRT_MEAN":
                return np.sqrt(counts)
        return counts
