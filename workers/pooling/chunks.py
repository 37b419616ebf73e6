"""ChunkPooler: one hidden state for each row of a decoder's step; a prompt may come in chunks.

LAST takes the last token's state. MEAN sums a chunk's states in float32 onto what earlier chunks have left in the row's slot.
CLS keeps the first token's there, and MAX the greatest element of all tokens so far. WEIGHTED_MEAN weighs a token by its place,
1, 2, ...; SQRT_MEAN divides a sum by the root of the number of tokens. A row's sum is formed in the order of its tokens,
whichever rows share the step. Tokens of a prompt before the text count unless the checkpoint says that they do not.
"""

from collections.abc import Sequence
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
    prompts: np.ndarray  # tokens of the prompt before a text, which do not count where the model says so

    @classmethod
    def of_rows(cls, prefill: np.ndarray, rows: np.ndarray, skips_prompts: bool = False) -> "Chunks":
        """prefill: these rows of a plan's section; copied, as the plan's place in the ring is given back."""
        slots, starts, lengths, flags = (prefill[name].copy() for name in ("slot", "start", "length", "flags"))
        return cls(rows, slots, starts, lengths, flags, np.maximum(prefill["next_token"], 0) * skips_prompts)

    def tokens(self, query_start: torch.Tensor) -> torch.Tensor:
        """int64 [all tokens of these chunks]: their indices among the step's tokens. query_start: each row's first."""
        within = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        rows = np.repeat(self.rows, self.lengths)
        index = torch.from_numpy(np.stack([rows, within]).astype(np.int64)).to(query_start.device)
        return query_start.index_select(0, index[0]).long() + index[1]

    def places(self) -> np.ndarray:
        """int64 [all tokens of these chunks]: each token's place in its prompt."""
        within = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return within + np.repeat(self.starts, self.lengths)

    def skipped(self) -> np.ndarray:
        """bool [all tokens of these chunks, 1]: whether a token is of the prompt before a text."""
        return (self.places() < np.repeat(self.prompts, self.lengths))[:, None]


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
            first = chunks.prompts - chunks.starts  # in the chunk; of a later or an earlier one: outside of it
            is_here = torch.from_numpy((first >= 0) & (first < chunks.lengths)).to(device)[:, None]
            first = torch.from_numpy(np.clip(first, 0, chunks.lengths - 1).astype(np.int64)).to(device)
            states = hidden.index_select(0, buffers.query_start.index_select(0, rows).long() + first).float()
            states = torch.where(is_here, states, kept)
            self._kept.index_copy_(0, slots, states)
            return states
        states = hidden.index_select(0, chunks.tokens(buffers.query_start)).float()
        lengths = torch.from_numpy(chunks.lengths.astype(np.int64)).to(device)
        skipped = torch.from_numpy(chunks.skipped()).to(device) if chunks.prompts.any() else None
        if self._type == "MAX":
            states = states if skipped is None else states.masked_fill(skipped, -torch.inf)
            greatest = torch.segment_reduce(states, "max", lengths=lengths)
            greatest = torch.where(begins, greatest, torch.maximum(greatest, kept))
            self._kept.index_copy_(0, slots, greatest)
            return greatest
        states = states if skipped is None else states.masked_fill(skipped, 0.0)
        if self._type == "WEIGHTED_MEAN":
            states *= torch.from_numpy((chunks.places() + 1).astype(np.float32)).to(device)[:, None]
        sums = torch.segment_reduce(states, "sum", lengths=lengths) + torch.where(begins, 0.0, kept)
        self._kept.index_copy_(0, slots, sums)
        return sums / torch.from_numpy(self._divisors(chunks)).to(device)[:, None]

    def _divisors(self, chunks: Chunks) -> np.ndarray:
        """float32 [n]: what the sums of rows are divided by; 1 where no token counts yet."""
        ends, prompts = (chunks.starts + chunks.lengths).astype(np.float32), chunks.prompts.astype(np.float32)
        counts = np.maximum(ends - prompts, 1)
        match self._type:
            case "WEIGHTED_MEAN":
                return np.maximum((ends * (ends + 1) - prompts * (prompts + 1)) / 2, 1)
            case "SQRT_MEAN":
                return np.sqrt(counts)
        return counts


class ChunkPoolers:
    """Several poolings side by side."""

    def __init__(self, types: Sequence[PoolingType], num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._poolers = [ChunkPooler(kind, num_slots, hidden_size, device) for kind in types]
        self.needs_every_token = any(pooler.needs_every_token for pooler in self._poolers)

    def take(self, hidden: torch.Tensor, chunks: Chunks, buffers: StepBuffers, **how: bool) -> torch.Tensor:
        """As of ChunkPooler: [n, H of all]."""
        found = [pooler.take(hidden, chunks, buffers, **how) for pooler in self._poolers]
        return found[0] if len(found) == 1 else torch.cat([states.float() for states in found], 1)
