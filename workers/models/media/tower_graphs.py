"""TowerGraphs: an encoder's runs as captured graphs, by padded patches. Runs of more patches, and all on a CPU, are eager.

A run of a few thousand patches is bound by the host, which launches some thousand kernels for it; a graph is one launch. The
inputs of a graph are buffers: pixels, which all sizes share as they do the rows, and tensors that follow from the items' sizes.
Patches behind the last item are padding: in attention they have no row, everything else is computed patch by patch, or by
groups of patches that become one token, and their rows are left out. So padding changes no result but by how a product of more
rows is rounded.

Sizes are captured at start, the largest first, so that the others fit into its memory, and for SECONDS at most. A size without
a graph is run eagerly, without padding. All ranks keep as many as the rank that captured the fewest, so that they round alike.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from quire.ipc.memory_plan import MOST_GRAPH_PATCHES

log = logging.getLogger("quire.workers")

# padding is at most a half of a small run, and a quarter of one that the device takes long for
SIZES = (256, 384, 512, 768, 1024, 1536, *range(2048, 4096, 512), *range(4096, MOST_GRAPH_PATCHES + 1, 1024))
SECONDS = 1.0
Arguments = Mapping[str, Any]  # of the encoder: tensors, and bounds of lengths as integers
Run = Callable[[torch.Tensor, Arguments], torch.Tensor]  # pixels [n, width] and arguments, on the device -> rows [n // unit, H]
Capture = Callable[[Callable[[], None], Any], Any]


class _Captured(NamedTuple):
    graph: Any
    given: dict[str, Any]  # buffers


class TowerGraphs:
    """unit: patches that become a token. most: patches of the largest run that is worth a graph, at most MOST_GRAPH_PATCHES.
    width: of a patch's pixels. capture: `capture.captured`."""

    def __init__(
        self, run: Run, capture: Capture, *, unit: int, most: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        self.sizes = sizes_up_to(most, unit)
        self._run, self._capture, self._unit, self._device = run, capture, unit, device
        with torch.inference_mode(False):
            self._pixels = torch.zeros(max(self.sizes, default=0), width, dtype=dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._rows: torch.Tensor | None = None  # of the last run; a result for each size would take hundreds of MB
        self._graphs: dict[int, _Captured] = {}

    def __call__(self, pixels: torch.Tensor, given: Arguments) -> torch.Tensor | None:
        """The rows of a run; None: it must be run eagerly. given: on the host."""
        patches = len(pixels)
        size = next((size for size in self.sizes if patches <= size), None)
        if size is None or (found := self._graphs.get(size)) is None:
            return None
        self._pixels[:patches].copy_(pixels)
        for name, value in padded(given, patches, size, self._unit).items():
            if isinstance(value, torch.Tensor):
                found.given[name].copy_(value if self._device.type == "cpu" else value.pin_memory(), non_blocking=True)
        found.graph.replay()
        assert self._rows is not None
        return self._rows[: patches // self._unit].clone()  # the next run overwrites them

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def keep(self, number: int) -> None:
        """Keep only the first `number` captured graphs, those of the largest sizes."""
        for size in list(self._graphs)[number:]:
            del self._graphs[size]

    def capture_all(self, arguments_of: Callable[[int], Arguments]) -> None:
        """Capture all sizes that the time allows. arguments_of: of an image with so many patches, on the host."""
        began, left = time.monotonic(), list(reversed(self.sizes))
        try:
            self._eager(self.sizes[0], arguments_of(self.sizes[0]))  # compiles kernels for small runs, if need be for seconds
            until = time.monotonic() + SECONDS
            while left and time.monotonic() < until:
                self._capture_size(left[0], arguments_of(left[0]))
                left.pop(0)
        except torch.OutOfMemoryError:
            log.warning("no memory is left for graphs of the encoder: other runs are eager")
        except RuntimeError as error:  # of a capture: some version of transformers may ask the device
            log.warning("the encoder's runs are eager, since they cannot be captured: %s", str(error).split("\n")[0][:200])
        log.info("%d graphs of the encoder captured in %.1f s", len(self._graphs), time.monotonic() - began)

    def _eager(self, size: int, given: Arguments) -> dict[str, Any]:
        """Run a size for an image of as many patches; returns its arguments on the device."""
        with torch.inference_mode(False):
            own = {
                name: value.to(self._device, copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in padded(given, size, size, self._unit).items()
            }
        rows = self._run(self._pixels[:size], own)
        if self._rows is None:
            with torch.inference_mode(False):
                self._rows = torch.zeros(self.sizes[-1] // self._unit, rows.shape[1], dtype=rows.dtype, device=self._device)
        return own

    def _capture_size(self, size: int, given: Arguments) -> None:
        own = self._eager(size, given)
        pixels, rows = self._pixels[:size], self._rows
        assert rows is not None

        def run() -> None:
            rows[: size // self._unit].copy_(self._run(pixels, own))

        self._graphs[size] = _Captured(self._capture(run, self._pool), own)


def sizes_up_to(most: int, unit: int) -> list[int]:
    """The sizes in patches up to the first that has room for `most`."""
    whole = [-(-size // unit) * unit for size in SIZES]
    larger = next((size for size in whole if size >= most), whole[-1])
    return [size for size in whole if size <= larger]


def padded(given: Arguments, patches: int, size: int, unit: int) -> dict[str, Any]:
    """The arguments of a run of so many patches, for a graph of `size`.

    Bounds between rows, int32 [rows + 1], become as many as there can be: rows that are not there are empty, and so are those
    of the padding. Other tensors are by patch, or by token, and get zeros, but for an order of tokens, which goes on.
    """
    made: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            made[name] = size  # the bound of a length
        elif name.startswith("cu_"):
            made[name] = functional.pad(value, (0, size // unit + 1 - len(value)), value=patches)
        elif name == "window_index":
            rest = torch.arange(patches // unit, size // unit, dtype=value.dtype, device=value.device)
            made[name] = torch.cat([value, rest])
        elif name == "grid_thw":  # unused, as everything that follows from it is given
            made[name] = torch.ones(1, 3, dtype=value.dtype, device=value.device)
        else:
            made[name] = functional.pad(value, (0, 0) * (value.dim() - 1) + (0, size - patches))
    return made
