"""Prometheus metrics of a frontend, under vLLM's names with the prefix `quire:`.

What the engine counts (running, waiting, KV usage, tokens, cache hits, preemptions) comes from the core's last Beat. What only
a frontend sees (latencies, finished requests) it counts itself, in a block of doubles: fixed slots, so a count costs an index
and an addition (0.15 us), and several frontends that share a port share one memory file, each the only writer of its own block,
so that a scrape that reaches any of them sees them all. Label sets are closed: the served model's name, finish reasons, our
routes and statuses; nothing a client sends becomes a label.
"""

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.ipc.messages import Beat

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

FINISH_REASONS = ("stop", "length", "abort", "error")
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ping", "/version", "/tokenize", "/detokenize",
    "/metrics", "/v1/files", "/v1/batches", "other",
)  # fmt: skip
STATUSES = ("2xx", "4xx", "5xx")

# Upper bounds of histogram buckets.
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.1, 0.25, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_COUNTS = (1, 2, 5, 10, 20, 50, 100)

# name: (help, buckets)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two outputs of one streamed request.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per output token after the first, by request.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens by request.", _TOKENS),
    "request_generation_tokens": ("Output tokens by request, over all its choices.", _TOKENS),
    "request_params_n": ("The parameter n.", _COUNTS),
    "request_params_max_tokens": ("The parameter max_tokens.", _TOKENS),
}
# name: (help, label name, label values)
COUNTERS: dict[str, tuple[str, str, Sequence[str]]] = {
    "request_success": ("Finished sequences by reason.", "finished_reason", FINISH_REASONS),
    "http_requests": ("HTTP answers.", "route_status", tuple(f"{r} {s}" for r in ROUTES for s in STATUSES)),
}
# Of a Beat: name, help, value
GAUGES: tuple[tuple[str, str, Callable[[Beat], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda b: b.num_running),
    ("num_requests_waiting", "Requests waiting to run.", lambda b: b.num_waiting),
    ("kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", lambda b: b.kv_usage),
)
ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[Beat], float]], ...] = (
    ("prompt_tokens", "Prompt tokens processed.", lambda b: b.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda b: b.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda b: b.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda b: b.cached_tokens),
    ("num_preemptions", "Preemptions.", lambda b: b.preemptions),
    ("worker_restarts", "Restarts of the engine's workers.", lambda b: b.worker_restarts),
)


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
        self._all = memoryview(memory if memory is not None else bytearray(block_bytes())).cast("d")
        size = block_bytes() // 8
        self._num_blocks = len(self._all) // size
        self._mine = self._all[block * size : (block + 1) * size]
        self.histograms: dict[str, Histogram] = {}
        self._counters: dict[tuple[str, str], int] = {}
        for (name, label), slot in _layout():
            if label is None:
                self.histograms[name] = Histogram(self._mine, slot, HISTOGRAMS[name][1])
            else:
                self._counters[name, label] = slot
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]

    def count(self, name: str, label: str) -> None:
        self._mine[self._counters[name, label]] += 1.0  # type: ignore[call-overload]

    def count_http(self, route: str, status: int) -> None:
        self.count("http_requests", f"{route if route in ROUTES else 'other'} {status // 100 if status >= 400 else 2}xx")

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    # ------------------------------------------------------------------------------------------------------ for scrapes
    def render(self, model_name: str, beat: Beat | None) -> bytes:
        """All frontends' numbers in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Snapshot(list(self._families(model_name, beat))))
        return generate_latest(registry)

    def _sum(self, slot: int) -> float:
        size = block_bytes() // 8
        return sum(self._all[block * size + slot] for block in range(self._num_blocks))

    def _families(self, model_name: str, beat: Beat | None) -> Iterator[Metric]:
        labels, values = ["model_name"], [model_name]
        if beat is not None:
            for name, text, of in GAUGES:
                gauge = GaugeMetricFamily(f"quire:{name}", text, labels=labels)
                gauge.add_metric(values, of(beat))
                yield gauge
            for name, text, of in ENGINE_COUNTERS:
                counter = CounterMetricFamily(f"quire:{name}", text, labels=labels)
                counter.add_metric(values, of(beat))
                yield counter
        yield self._requests(model_name)
        yield self._answers()
        for name, (text, buckets) in HISTOGRAMS.items():
            start, total, rows = self.histograms[name].start, 0.0, []
            for i, bound in enumerate([*buckets, float("inf")]):
                total += self._sum(start + i)
                rows.append(("+Inf" if i == len(buckets) else repr(float(bound)), total))
            family = HistogramMetricFamily(f"quire:{name}", text, labels=labels)
            family.add_metric(values, rows, self._sum(start + len(buckets) + 1))
            yield family

    def _requests(self, model_name: str) -> Metric:
        family = CounterMetricFamily(
            "quire:request_success", COUNTERS["request_success"][0], labels=["model_name", "finished_reason"]
        )
        for reason in FINISH_REASONS:
            family.add_metric([model_name, reason], self._sum(self._counters["request_success", reason]))
        return family

    def _answers(self) -> Metric:
        family = CounterMetricFamily("quire:http_requests", COUNTERS["http_requests"][0], labels=["handler", "status"])
        for route in ROUTES:
            for status in STATUSES:
                family.add_metric([route, status], self._sum(self._counters["http_requests", f"{route} {status}"]))
        return family


class _Snapshot(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _layout() -> Iterator[tuple[tuple[str, str | None], int]]:
    """(name, label or None) and first slot of everything that a frontend counts."""
    slot = 0
    for name, (_, _, values) in COUNTERS.items():
        for value in values:
            yield (name, value), slot
            slot += 1
    for name, (_, buckets) in HISTOGRAMS.items():
        yield (name, None), slot
        slot += len(buckets) + 2


def block_bytes() -> int:
    """Size of one frontend's block."""
    num_slots = sum(len(values) for _, _, values in COUNTERS.values())
    num_slots += sum(len(buckets) + 2 for _, buckets in HISTOGRAMS.values())
    return 8 * num_slots
