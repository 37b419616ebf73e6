"""RowMasks: the grammar masks of a step's rows on a device, as the sampler's tail reads them: all ones where a row has none.

The tensor stays, since captured tails hold its address. A row that a step expects a mask for is overwritten or set back by what
comes for it; those that had one before and expect none are set back first, so that rows that always have one cost nothing more.
On a GPU records are staged in pinned buffers that are used again, and nothing waits for the device. Owned by a Device, filled
by the runner between a step's forward and its tail.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from quire.ipc.step.masks import MASK_RECORD_WORDS, RowsAndMasks
from quire.ipc.step.plan import StepPlan

ReadMasks = Callable[[StepPlan], Iterable[RowsAndMasks]]  # the masks that a plan says will follow, as they come


class RowMasks(ABC):
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """tensor: int32 [max_rows, ceil(V / 32)], bit set = allowed."""
        self.tensor = torch.full((max_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._has_mask = np.zeros(max_rows, bool)

    def load(self, expected: np.ndarray, records: Iterable[RowsAndMasks]) -> np.ndarray:
        """Take a step's masks as they come, each record read before the next; expected: the rows that are to get one, int32.

        Returns the rows that were named, int32: with a mask, or with None because they may be any token. What the others hold
        is not to be used.
        """
        stale = self._has_mask.copy()
        stale[expected] = False
        self._set_back(stale.nonzero()[0])
        loaded = [np.zeros(0, np.int32)]
        for rows, masks in records:
            loaded.append(rows.copy())
            if masks is None:
                self._set_back(rows[self._has_mask[rows]])
            else:
                self._copy(rows, masks)
                self._has_mask[rows] = True
        return np.concatenate(loaded)

    def _set_back(self, rows: np.ndarray) -> None:
        if len(rows):
            self._fill(rows)
            self._has_mask[rows] = False

    @abstractmethod
    def _fill(self, rows: np.ndarray) -> None:
        """Set these rows to all ones."""

    @abstractmethod
    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        """Set these rows, int32 [n], to masks, int32 [n, words]; both are valid for this call alone."""


class CpuMasks(RowMasks):
    def __init__(self, max_rows: int, vocab_size: int) -> None:
        super().__init__(max_rows, vocab_size, torch.device("cpu"))
        self._words = self.tensor.numpy()

    def _fill(self, rows: np.ndarray) -> None:
        self._words[rows] = -1

    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        self._words[rows] = masks


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


class CudaMasks(RowMasks):
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._staging = Staging(_pinned, torch.cuda.Event)

    def _fill(self, rows: np.ndarray) -> None:
        self.tensor.index_fill_(0, self._stage(rows)[: len(rows)].long(), -1)

    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        """One copy to the device: to where the masks belong if nothing is between their rows, else with these, to be moved."""
        n, first = len(rows), int(rows.min())
        if int(rows.max()) - first + 1 == n:  # in any order
            buffer = self._staging.take()
            staged = buffer[: masks.size].view(masks.shape)
            if (rows[1:] > rows[:-1]).all():  # so they mostly come
                staged.numpy()[...] = masks
            else:
                staged.numpy()[rows - first] = masks
            self.tensor[first : first + n].copy_(staged, non_blocking=True)
            self._staging.copying(buffer)
        else:
            there = self._stage(rows, masks)
            self.tensor.index_copy_(0, there[:n].long(), there[n:].view(masks.shape))

    def _stage(self, *parts: np.ndarray) -> torch.Tensor:
        """A copy of these on the device, one after the other, int32 [their sizes together]."""
        buffer, at = self._staging.take(), 0
        staged = buffer.numpy()
        for part in parts:
            staged[at : at + part.size] = part.reshape(-1)
            at += part.size
        there = buffer[:at].to(self.tensor.device, non_blocking=True)
        self._staging.copying(buffer)
        return there
