"""What a frontend counts for /metrics: latencies, finished requests, HTTP answers. Text is made of it in metrics_text.py.

What the engine counts comes with the core's last Heartbeat and is never added up. What only a frontend sees it counts itself,
in a block of doubles: fixed slots, so a count costs an index and an addition (0.15 us), and frontends that share a port share
one memory file, each the only writer of its own block, so that a scrape that reaches any of them sees them all, and those of a
frontend that died: its successor counts on in the same block. Label sets are closed: finish reasons, our routes, methods and
statuses; nothing a client sends becomes a label.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.frontend.http.api.metrics.metric_names import FINISH_REASONS, HISTOGRAMS, HTTP_SECONDS, METHODS, STATUSES
from quire.ipc.process.usage import ProcessUsage, process_usage

MAX_HANDLERS = 96  # names of routes
NO_HANDLER = "none"  # of paths that are not there, as prometheus-fastapi-instrumentator calls them
# What is asked for all the time and is nobody's request; vLLM leaves them out, too.
UNCOUNTED = frozenset(("/metrics", "/health", "/ping", "/load", "/version", "/server_info", "/ready", "/live"))
_HTTP_SLOTS = len(STATUSES) + len(HTTP_SECONDS) + 2  # of a handler and a method: statuses, buckets, sum
_PID = 0  # the first slot; then reasons of ends, histograms, HTTP by handler and method
_HTTP_START = _PID + 1 + len(FINISH_REASONS) + sum(len(buckets) + 2 for _, buckets in HISTOGRAMS.values())
_NUM_SLOTS = _HTTP_START + MAX_HANDLERS * len(METHODS) * _HTTP_SLOTS


class Histogram:
    """Slots [start, start + len(buckets)] count observations by bucket (the last: above all), the next one is their sum."""

    __slots__ = ("_sum", "_values", "buckets", "start")

    def __init__(self, values: "memoryview[float]", start: int, buckets: Sequence[float]) -> None:
        self._values = values
        self.start = start
        self.buckets = buckets
        self._sum = start + len(buckets) + 1

    def observe(self, value: float) -> None:
        self._values[self.start + bisect_left(self.buckets, value)] += 1.0  # type: ignore[call-overload]
        self._values[self._sum] += value  # type: ignore[call-overload]


class Metrics:
    """The metrics of one frontend. memory: a shared map of `block_bytes() * num_blocks`, None for a private one."""

    def __init__(self, memory: mmap.mmap | None = None, block: int = 0) -> None:
        self._memory = memory if memory is not None else bytearray(block_bytes())
        self._mine = memoryview(self._memory).cast("d")[block * _NUM_SLOTS : (block + 1) * _NUM_SLOTS]
        self._mine[_PID] = float(os.getpid())  # type: ignore[call-overload]
        self.handlers: dict[str, int] = {NO_HANDLER: 0}  # the same in every frontend
        self.histograms: dict[str, Histogram] = {}
        self.counters: dict[tuple[str, str], int] = {}  # (name, label) -> slot
        for (name, label), slot in _layout():
            if label is None:
                self.histograms[name] = Histogram(self._mine, slot, HISTOGRAMS[name][1])
            else:
                self.counters[name, label] = slot
        self._http_duration = self.histograms["http_request_duration_highr_seconds"]

    def register_handlers(self, names: Iterable[str]) -> None:
        """The routes' names, in the same order in every frontend."""
        for name in names:
            if name not in UNCOUNTED and len(self.handlers) < MAX_HANDLERS:
                self.handlers.setdefault(name, len(self.handlers))

    def count(self, name: str, label: str) -> None:
        self._mine[self.counters[name, label]] += 1.0  # type: ignore[call-overload]

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An answer has ended, `seconds` after its request was complete."""
        if handler in UNCOUNTED:
            return
        values, start = self._mine, http_slot(self.handlers.get(handler, 0), METHODS.index(method) if method in METHODS else -1)
        values[start + status // 100 - 1] += 1.0  # type: ignore[call-overload]
        start += len(STATUSES)
        values[start + bisect_left(HTTP_SECONDS, seconds)] += 1.0  # type: ignore[call-overload]
        values[start + len(HTTP_SECONDS) + 1] += seconds  # type: ignore[call-overload]
        self._http_duration.observe(seconds)

    # ------------------------------------------------------------------------------------------------------ for scrapes
    def totals(self) -> list[float]:
        """All slots, of all frontends together."""
        return self._blocks().sum(axis=0).tolist()

    def processes(self) -> list[ProcessUsage]:
        """The frontends' that run, and, where there are several, of the one that started them."""
        pids = [int(pid) for pid in self._blocks()[:, _PID]]
        names = {pid: f"frontend-{index}" for index, pid in enumerate(pids) if pid}
        if len(pids) > 1:
            names[os.getppid()] = "server"
        return [usage for pid, name in names.items() if (usage := process_usage(pid, name)) is not None]

    def _blocks(self) -> np.ndarray:
        return np.frombuffer(self._memory, np.float64).reshape(-1, _NUM_SLOTS)


def http_slot(handler: int, method: int) -> int:
    """First slot of a handler and a method (-1: other): statuses, then as Histogram."""
    return _HTTP_START + (handler * len(METHODS) + method % len(METHODS)) * _HTTP_SLOTS


def _layout() -> Iterator[tuple[tuple[str, str | None], int]]:
    """(name, label or None) and first slot of everything that a frontend counts, but HTTP by handler."""
    slot = _PID + 1
    for reason in FINISH_REASONS:
        yield ("request_success", reason), slot
        slot += 1
    for name, (_, buckets) in HISTOGRAMS.items():
        yield (name, None), slot
        slot += len(buckets) + 2


def block_bytes() -> int:
    """Size of one frontend's block."""
    return 8 * _NUM_SLOTS
