"""RowMasks: the grammar masks of a step's rows on a device, as the sampling graph reads them: all ones where a row has none.

The tensor is never replaced, since sampling graphs hold its address. A row that expects a mask in this step is overwritten by
the record that comes for it. A row that had a mask before and expects none is reset to ones before that; so rows that always
have a mask are never reset. In a step with windows the tensor has a row for each sample, and which these are is known to the
device alone: all masks of the step before are reset, and those that come are put in their places by the device.

A GPU copies records directly from the plan ring, if that can be page-locked; the ring keeps them until then. Otherwise they are
staged in pinned buffers, which are reused. Nothing waits for the device. Owned by a Device, filled by the runner between a
step's forward and its sampling.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import torch

from quire.ipc.step.masks import MASK_RECORD_WORDS, RowsAndMasks, mask_words, rows_and_places
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.plan_ring import PlanReader

log = logging.getLogger("quire.workers")

_READ_ONLY = 8  # cudaHostRegisterReadOnly: a worker cannot map the ring otherwise
ReadMasks = Callable[[StepPlan], Iterable[RowsAndMasks]]  # yields the masks that follow a plan, as they come


class RowMasks(ABC):
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """tensor: int32 [max_rows, mask_words(V)], bit set = allowed. max_rows: or samples."""
        self.tensor = torch.full((max_rows, mask_words(vocab_size)), -1, dtype=torch.int32, device=device)
        self._has_mask = np.zeros(max_rows, bool)
        self._of_samples: list[torch.Tensor] = []  # rows of the tensor with masks of a step with windows, on the device

    def read_from(self, reader: PlanReader) -> None:  # noqa: B027 - optional
        """Records will be views of this ring's memory, each of the record last read."""

    def close(self) -> None:  # noqa: B027 - optional
        """No more masks will come."""

    def load(
        self, expected: np.ndarray, records: Iterable[RowsAndMasks], first_sample: torch.Tensor | None = None
    ) -> np.ndarray:
        """Load a step's masks as they come, each record before the next is read. expected: the rows that wait for one, int32.

        first_sample: int32 [rows], of a step with windows, which is on the device. Returns the rows of all records, int32:
        those that got a mask, and those that may be any token (their record has None). The masks of other expected rows must
        not be used.
        """
        for samples in self._of_samples:
            self.tensor.index_fill_(0, samples, -1)
        self._of_samples.clear()
        if first_sample is not None:
            return self._load_samples(records, first_sample)
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

    def _load_samples(self, records: Iterable[RowsAndMasks], first_sample: torch.Tensor) -> np.ndarray:
        self._set_back(self._has_mask.nonzero()[0])
        loaded = [np.zeros(0, np.int32)]
        for rows, masks in records:
            if masks is None:
                loaded.append(rows.copy())
                continue
            of_row, places = rows_and_places(rows)
            loaded.append(np.unique(of_row))
            at = self._to_device(np.stack((of_row, places)))
            samples = first_sample.index_select(0, at[0]).add_(at[1]).long()
            self._of_samples.append(samples)
            self.tensor.index_copy_(0, samples, self._to_device(masks))
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
        """Set these rows, int32 [n], to masks, int32 [n, words]; both arrays are valid during this call only."""

    @abstractmethod
    def _to_device(self, words: np.ndarray) -> torch.Tensor:
        """The words, int32, as a tensor there; valid while other words are read."""


class CpuMasks(RowMasks):
    def __init__(self, max_rows: int, vocab_size: int) -> None:
        super().__init__(max_rows, vocab_size, torch.device("cpu"))
        self._words = self.tensor.numpy()

    def _fill(self, rows: np.ndarray) -> None:
        self._words[rows] = -1

    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        self._words[rows] = masks

    def _to_device(self, words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.copy())  # the ring is read-only, which torch warns about


class Staging:
    """Host buffers for asynchronous copies; a buffer is reused once the copy from it is done."""

    def __init__(self, make: Callable[[], torch.Tensor], make_event: Callable[[], torch.cuda.Event]) -> None:
        self._make, self._make_event = make, make_event
        self._used: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # in the order of their copies

    def take(self) -> torch.Tensor:
        """A buffer from which no copy is under way."""
        return self._used.popleft()[0] if self._used and self._used[0][1].query() else self._make()

    def copying(self, buffer: torch.Tensor) -> None:
        """A copy from this buffer was given to the current stream."""
        event = self._make_event()
        event.record()
        self._used.append((buffer, event))


class PinnedRing:
    """A plan ring's memory, page-locked: records are copied directly from it, and held until the copy is done."""

    def __init__(self, reader: PlanReader, make_event: Callable[[], torch.cuda.Event]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is read-only; it is never written to
            self.tensor = torch.from_numpy(reader.memory)
        self._hold, self._make_event = reader.hold, make_event

    def find(self, words: np.ndarray) -> torch.Tensor | None:
        """The words as a view of the ring's memory, if they are contiguous there; else None."""
        at = (_address(words) - self.tensor.data_ptr()) // 4
        if not words.flags.c_contiguous or not 0 <= at < len(self.tensor):
            return None
        return self.tensor[at : at + words.size].view(words.shape)

    def copying(self) -> None:
        """A copy from the record last read was given to the current stream."""
        event = self._make_event()
        event.record()
        self._hold(event.query)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def page_lock(reader: PlanReader, device: torch.device) -> PinnedRing | None:
    """None where the system or the driver does not allow it."""
    memory = reader.memory
    error = torch.cuda.cudart().cudaHostRegister(_address(memory), memory.nbytes, _READ_ONLY)
    if int(error) == 0:
        return PinnedRing(reader, torch.cuda.Event)
    with suppress(RuntimeError):  # CUDA reports this error once more, at the next launch
        torch.ones(1, device=device)
    log.info("the plan ring cannot be page-locked (CUDA error %d): masks are copied once more", int(error))
    return None


def _pinned() -> torch.Tensor:
    return torch.empty(MASK_RECORD_WORDS, dtype=torch.int32).pin_memory()


class CudaMasks(RowMasks):
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._staging = Staging(_pinned, torch.cuda.Event)
        self._ring: PinnedRing | None = None

    def read_from(self, reader: PlanReader) -> None:
        self._ring = page_lock(reader, self.tensor.device)

    def close(self) -> None:
        """To be called when all copies are done."""
        if self._ring is not None:
            torch.cuda.cudart().cudaHostUnregister(self._ring.tensor.data_ptr())
            self._ring = None

    def _fill(self, rows: np.ndarray) -> None:
        self.tensor.index_fill_(0, self._to_device(rows).long(), -1)

    def _copy(self, rows: np.ndarray, masks: np.ndarray) -> None:
        """Copy masks to their rows directly if these are consecutive; else to a temporary tensor and on from there."""
        n, first = len(rows), int(rows[0])
        if int(rows[-1]) - first + 1 == n and (rows[1:] > rows[:-1]).all():  # the usual case
            self._copy_to(self.tensor[first : first + n], masks)
        else:
            self.tensor.index_copy_(0, self._to_device(rows).long(), self._to_device(masks))

    def _to_device(self, words: np.ndarray) -> torch.Tensor:
        there = torch.empty(words.shape, dtype=torch.int32, device=self.tensor.device)
        self._copy_to(there, words)
        return there

    def _copy_to(self, there: torch.Tensor, words: np.ndarray) -> None:
        """Launch a copy on the current stream, from the ring if the words lie there, else from a staging buffer."""
        if self._ring is not None and (found := self._ring.find(words)) is not None:
            there.copy_(found, non_blocking=True)
            self._ring.copying()
            return
        buffer = self._staging.take()
        staged = buffer[: words.size].view(words.shape)
        staged.numpy()[...] = words
        there.copy_(staged, non_blocking=True)
        self._staging.copying(buffer)
