"""Guarded runs of an encoder: an item that it fails on gets rows of zeros, and the worker goes on.

A step must run on all ranks or on none, so no rank may leave it out: the rank that failed computes it with zeros, and says so
(`report`); the core then ends the requests that have used the item. An exception is told of before the step runs. Whether all
values are finite is known on a CPU at once, on a GPU when the run has ended: `settle`, called once the step has been launched,
waits for that, and not for the step itself. The step may end before: the core waits for ItemsEncoded, sent behind `settle`,
before it takes the results, so no request is answered from rows of zeros.

An error that the device does not recover from is raised: it ends the worker.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from quire.ipc.messages.workers import ItemFault
from quire.workers.models.media.arriving import Arriving

log = logging.getLogger("quire.workers")

Report = Callable[[int, ItemFault], None]  # of an item, by its number on the plan ring


class GuardedRuns:
    """width: of a row. report: called for each item that could not be encoded."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device):
        self.report: Report = lambda number, fault: None
        self._width, self._dtype, self._device = width, dtype, device
        self._has_run = False  # since `settle`
        self._unsettled: tuple[torch.cuda.Event, torch.Tensor, list[int]] | None = None  # bool [items] on the host, and numbers

    def rows(self, encode: Callable[[list[Arriving]], torch.Tensor], batches: Sequence[list[Arriving]]) -> torch.Tensor:
        """The rows of all items, [tokens, width]. encode: makes the rows of a batch."""
        parts = [rows for batch in batches for rows in self._of_batch(encode, batch)]
        items = [item for batch in batches for item in batch]
        finite = torch.stack([part.isfinite().all() for part in parts])
        made = torch.cat([part.where(is_finite, 0.0) for part, is_finite in zip(parts, finite, strict=True)])
        numbers = [item.number for item in items]
        if self._device.type == "cpu":
            self._report_wrong(finite, numbers)
        else:
            self.settle()
            on_host = torch.empty(len(items), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._unsettled = event, on_host, numbers
        self._has_run = True
        return made

    def settle(self) -> bool:
        """Tell of items with values that are not finite, once the last run has ended on the device. Returns whether there was
        a run since the last call: all that has failed in it is reported now."""
        if self._unsettled is not None:
            (event, finite, numbers), self._unsettled = self._unsettled, None
            event.synchronize()
            self._report_wrong(finite, numbers)
        has_run, self._has_run = self._has_run, False
        return has_run

    def _report_wrong(self, finite: torch.Tensor, numbers: Sequence[int]) -> None:
        for number, is_finite in zip(numbers, finite.tolist(), strict=True):
            if not is_finite:
                self.report(number, "not_finite")

    def _of_batch(self, encode: Callable[[list[Arriving]], torch.Tensor], batch: list[Arriving]) -> list[torch.Tensor]:
        """The rows of each item. If a run of several fails, each is encoded alone, so that only those at fault fail."""
        fault: ItemFault
        counts = [item.item.num_tokens for item in batch]
        try:
            made = encode(batch)
            if made.shape != (sum(counts), self._width):
                raise ValueError(f"the encoder made rows of shape {tuple(made.shape)}, not {(sum(counts), self._width)}")
            return list(made.to(self._dtype).split(counts))
        except torch.AcceleratorError:
            raise
        except (torch.OutOfMemoryError, MemoryError):
            fault = "memory"
        except Exception:  # an item's edge: its requests end with an error, and the worker goes on
            fault = "error"
            log.exception("the encoder failed on %d items", len(batch))
        if len(batch) > 1:  # here, because the exception holds the failed run's tensors
            return [rows for item in batch for rows in self._of_batch(encode, [item])]
        self.report(batch[0].number, fault)
        return [torch.zeros(counts[0], self._width, dtype=self._dtype, device=self._device)]
