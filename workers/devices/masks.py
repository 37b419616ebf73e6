"""RowMasks: the grammar masks of a step's rows on a device, as the sampler's tail reads them: all ones where a row has none.

The tensor stays, since captured tails hold its address: a step sets the rows that have a mask, and the next step with masks
sets them back. On a GPU records are staged in pinned buffers that are used again, and nothing waits for the device. Owned by a
Device, filled by the runner between a step's forward and its tail.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

from quire.ipc.step.masks import MASK_RECORD_WORDS, RowsAndMasks
from quire.ipc.step.plan import StepPlan

ReadMasks = Callable[[StepPlan], Iterable[RowsAndMasks]]  # the masks that a plan says will follow, as they come


class RowMasks(Protocol):
    tensor: torch.Tensor  # int32 [max_rows, ceil(V / 32)], bit set = allowed

    def load(self, records: Iterable[RowsAndMasks]) -> np.ndarray:
        """Take a step's masks as they come; returns the rows that were named, int32: with a mask, or with None because they
        may be any token. Each is read before the next."""


def _rows(loaded: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *loaded])


def _all_ones(max_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.full((max_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)


class CpuMasks:
    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.tensor = _all_ones(max_rows, vocab_size, torch.device("cpu"))
        self._words = self.tensor.numpy()
        self._set = _rows([])

    def load(self, records: Iterable[RowsAndMasks]) -> np.ndarray:
        self._words[self._set] = -1
        loaded, masked = [], []
        for rows, masks in records:
            loaded.append(rows.copy())
            if masks is not None:
                self._words[rows] = masks
                masked.append(loaded[-1])
        self._set = _rows(masked)
        return _rows(loaded)


class Staging:
    """Host buffers for asynchronous copies, each used again once the copy from it is done."""

    def __init__(self, make: Callable[[], torch.Tensor], make_event: Callable[[], torch.cuda.Event]) -> None:
        self._make, self._make_event = make, make_event
        self._used: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # in the order of their copies

    def take(self) -> torch.Tensor:
        """A buffer that no copy reads from any more."""
        return self._used.popleft()[0] if self._used and self._used[0][1].query() else self._make()

    def copying(self, buffer: torch.Tensor) -> None:
        """A copy from this buffer was given to the current stream."""
        event = self._make_event()
        event.record()
        self._used.append((buffer, event))


def _pinned() -> torch.Tensor:
    return torch.empty(MASK_RECORD_WORDS, dtype=torch.int32).pin_memory()


class CudaMasks:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.tensor = _all_ones(max_rows, vocab_size, device)
        self._staging = Staging(_pinned, torch.cuda.Event)
        self._set = torch.zeros(max_rows, dtype=torch.int64, device=device)  # rows that have a mask,
        self._num_set = 0  # so many

    def load(self, records: Iterable[RowsAndMasks]) -> np.ndarray:
        self.tensor.index_fill_(0, self._set[: self._num_set], -1)
        self._num_set = 0
        loaded = []
        for rows, masks in records:
            if masks is not None:
                self._copy(rows, masks)
            loaded.append(rows.copy())
        return _rows(loaded)

    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        """One copy to the device, of rows and masks together, and two within it."""
        n, words = masks.shape
        buffer = self._staging.take()
        staged = buffer.numpy()
        staged[:n] = rows
        staged[n : n + masks.size] = masks.reshape(-1)
        there = buffer[: n + masks.size].to(self.tensor.device, non_blocking=True)
        self._staging.copying(buffer)
        at = self._set[self._num_set : self._num_set + n].copy_(there[:n])
        self.tensor.index_copy_(0, at, there[n:].view(n, words))
        self._num_set += n
