"""The counts of a frontend for /metrics: latencies, finished requests, HTTP answers. metrics_text.py makes text of them.

The engine's values come with the core's last Heartbeat and are not counted here. A frontend counts what only it sees, in a
panel of doubles with fixed slots: a count costs an index and an addition (0.15 us). Frontends that share a port share one
memory file; each writes only its own panel. So a scrape of any frontend has the counts of all, and of one that died, for its
successor goes on with the same panel. Labels have fixed sets of values: finish reasons, routes, methods and statuses, nothing
that a client sends.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.frontend.http.api.metrics.metric_names import (
    FINISH_REASONS,
    HISTOGRAMS,
    HTTP_SECONDS,
    MEDIA,
    METHODS,
    REFUSALS,
    STATUSES,
)
from quire.ipc.process.usage import ProcessUsage, process_usage

MAX_HANDLERS = 96  # names of routes
NO_HANDLER = "none"  # the label of unknown paths, as in prometheus-fastapi-instrumentator
# Probes and scrapes, which come all the time; vLLM does not count them either.
UNCOUNTED = frozenset(("/metrics", "/health", "/ping", "/load", "/version", "/server_info", "/ready", "/live"))
_HTTP_SLOTS = len(STATUSES) + len(HTTP_SECONDS) + 2  # for a handler and a method: statuses, buckets, sum
_PID = 0  # the first slot; then finish reasons, refusals, images, histograms, HTTP by handler and method
_HTTP_START = (
    _PID + 1 + len(FINISH_REASONS) + len(REFUSALS) + len(MEDIA) + sum(len(buckets) + 2 for _, buckets in HISTOGRAMS.values())
)
_NUM_SLOTS = _HTTP_START + MAX_HANDLERS * len(METHODS) * _HTTP_SLOTS


class Histogram:
    """Slots [start, start + len(buckets)] count observations by bucket (the last: above all bounds); the next is their sum."""

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
    """The metrics of one frontend. memory: a shared map with a panel (`panel_bytes()`) for each frontend, or None."""

    def __init__(self, memory: mmap.mmap | None = None, panel: int = 0) -> None:
        self._memory = memory if memory is not None else bytearray(panel_bytes())
        self._mine = memoryview(self._memory).cast("d")[panel * _NUM_SLOTS : (panel + 1) * _NUM_SLOTS]
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
        """Assign slots to the routes' names, which come in the same order in every frontend."""
        for name in names:
            if name not in UNCOUNTED and len(self.handlers) < MAX_HANDLERS:
                self.handlers.setdefault(name, len(self.handlers))

    def count(self, name: str, label: str) -> None:
        self._mine[self.counters[name, label]] += 1.0  # type: ignore[call-overload]

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answer that has ended. seconds: since its request was complete."""
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
        """The sum of every slot over all frontends."""
        return self._panels().sum(axis=0).tolist()

    def processes(self) -> list[ProcessUsage]:
        """The usage of the frontends that run, and, if there are several, of the process that started them."""
        pids = [int(pid) for pid in self._panels()[:, _PID]]
        names = {pid: f"frontend-{index}" for index, pid in enumerate(pids) if pid}
        if len(pids) > 1:
            names[os.getppid()] = "server"
        return [usage for pid, name in names.items() if (usage := process_usage(pid, name)) is not None]

    def _panels(self) -> np.ndarray:
        return np.frombuffer(self._memory, np.float64).reshape(-1, _NUM_SLOTS)


def http_slot(handler: int, method: int) -> int:
    """The first slot of a handler and a method (-1: other). Statuses come first, then slots as in Histogram."""
    return _HTTP_START + (handler * len(METHODS) + method % len(METHODS)) * _HTTP_SLOTS


def _layout() -> Iterator[tuple[tuple[str, str | None], int]]:
    """(name, label or None) and first slot of all counts except HTTP by handler."""
    slot = _PID + 1
    for reason in FINISH_REASONS:
        yield ("request_success", reason), slot
        slot += 1
    for code in REFUSALS:
        yield ("requests_refused", code), slot
        slot += 1
    for label in MEDIA:
        yield ("media", label), slot
        slot += 1
    for name, (_, buckets) in HISTOGRAMS.items():
        yield (name, None), slot
        slot += len(buckets) + 2


def panel_bytes() -> int:
    """The size of one frontend's panel."""
    return 8 * _NUM_SLOTS
