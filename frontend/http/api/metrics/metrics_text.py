"""/metrics in Prometheus' text format: the counts of all frontends, and the engine's last Heartbeat.

prometheus-client took 4 ms to write some 600 lines and blocked this frontend's streams meanwhile; this takes 0.7 ms. Handlers
without a count are left out. So is a Heartbeat that is too old: no number is better than a wrong one.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.frontend.http.api.metrics import metric_names as names
from quire.frontend.http.api.metrics.metrics import MAX_HANDLERS, Metrics, http_slot
from quire.ipc.messages.frontend import Heartbeat, Welcome
from quire.ipc.messages.stats import AdapterStats, CacheInfo, Distribution
from quire.ipc.process.usage import ProcessUsage
from quire.ipc.version import VERSION

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
ALL_ENGINES = "all"  # the label `engine` of frontends' counts if there are several engines
MAX_HEARTBEAT_AGE_S = 2.0  # they come every 0.5 s

_PROCESS: tuple[tuple[str, str, str, Callable[[ProcessUsage], float]], ...] = (
    ("process_cpu_seconds_total", "counter", "User and system CPU time.", lambda p: p.cpu_s),
    ("process_resident_memory_bytes", "gauge", "Resident memory.", lambda p: p.resident_bytes),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory.", lambda p: p.virtual_bytes),
    ("process_start_time_seconds", "gauge", "Start time since the Unix epoch.", lambda p: p.start_time),
    ("process_open_fds", "gauge", "Open file descriptors.", lambda p: p.open_fds),
    ("process_max_fds", "gauge", "Most open file descriptors.", lambda p: p.max_fds),
)


class EngineState(NamedTuple):
    """One engine. heartbeat: the last one, which came at heartbeat_time (time.monotonic()); None if none came since the engine
    was found."""

    number: int
    cache: CacheInfo | None
    heartbeat: Heartbeat | None
    heartbeat_time: float


class _LiveEngine(NamedTuple):
    """An engine with a recent heartbeat. labels: made by `labels`."""

    number: int
    labels: str
    cache: CacheInfo | None
    heartbeat: Heartbeat


def metrics_text(metrics: Metrics, welcome: Welcome, engines: Sequence[EngineState]) -> bytes:
    """The whole text. welcome: values that hold for all engines. engines: all of them, also those that do not answer."""
    text, model, now = Text(), welcome.served_model_names[0], time.monotonic()
    live = [
        _LiveEngine(e.number, labels(model_name=model, engine=str(e.number)), e.cache, e.heartbeat)
        for e in engines
        if e.heartbeat is not None and now - e.heartbeat_time <= MAX_HEARTBEAT_AGE_S
    ]
    ready = {e.number for e in live if e.heartbeat.ready}
    text.family("quire:build_info", "gauge", "The version.", [(labels(version=VERSION), 1)])
    text.family("quire:engine_up", "gauge", "Whether the engine's loop turns and its workers are ready.",
                [(labels(model_name=model, engine=str(e.number)), int(e.number in ready)) for e in engines])  # fmt: skip
    if live:
        _engines(text, live)
    everyone = labels(model_name=model, engine="0" if len(engines) == 1 else ALL_ENGINES)
    _frontends(text, metrics.totals(), metrics, everyone, welcome.limits.max_model_len)
    processes = [(labels(process=p.name), p) for p in metrics.processes()]
    for e in live:
        of_engine = {} if len(engines) == 1 else {"engine": str(e.number)}
        processes += [
            (labels(process=p.name, **of_engine), p) for p in (e.heartbeat.stats.processes if e.heartbeat.stats else [])
        ]
    for name, kind, help_text, of in _PROCESS:
        text.family(name, kind, help_text, [(who, of(p)) for who, p in processes])
    return text.encoded()


def _engines(text: "Text", engines: Sequence[_LiveEngine]) -> None:
    for name, help_text, of in names.GAUGES:
        text.family(name, "gauge", help_text, [(e.labels, of(e.heartbeat)) for e in engines])
    for name, help_text, of in names.COUNTERS:
        values = [(e.labels, of(e.heartbeat) if name != "vllm:prefix_cache_queries" or _caches(e) else 0) for e in engines]
        text.family(f"{name}_total", "counter", help_text, values)
    for name, help_text, label, by_label in names.LABELLED_GAUGES:
        text.family(name, "gauge", help_text, [s for e in engines for s in _by_label(e.labels, label, by_label(e.heartbeat))])
    for name, help_text, label, by_label in names.LABELLED_COUNTERS:
        samples = [s for e in engines for s in _by_label(e.labels, label, by_label(e.heartbeat))]
        text.family(f"{name}_total", "counter", help_text, samples)
    counted = [(e.labels, e.heartbeat.stats) for e in engines if e.heartbeat.stats is not None]
    for name, help_text, of_optional in names.OPTIONAL_GAUGES:
        found_values = [(who, value) for who, stats in counted if (value := of_optional(stats)) is not None]
        text.family(name, "gauge", help_text, found_values)
    of_drafts = [(who, stats.speculation) for who, stats in counted if stats.speculation is not None]
    for name, help_text, of_speculation in names.DRAFT_COUNTERS:
        text.family(f"{name}_total", "counter", help_text, [(who, of_speculation(stats)) for who, stats in of_drafts])
    if counted:
        for name, help_text, bounds, of_stats in names.ENGINE_HISTOGRAMS:
            found: list[tuple[str, Distribution]] = [(who, of_stats(stats)) for who, stats in counted]
            text.histogram(name, help_text, [(who, bounds, each.counts, each.sum) for who, each in found])
    _adapters(text, [(e.labels, e.heartbeat.adapters) for e in engines if e.heartbeat.adapters is not None])
    infos = [(e.number, e.cache) for e in engines if e.cache is not None]
    if infos:
        shown = [(n, {name: str(getattr(cache, name)) for name in cache.__struct_fields__}) for n, cache in infos]
        text.family("vllm:cache_config_info", "gauge", "The KV cache.", [(labels(engine=str(n), **of), 1) for n, of in shown])


def _adapters(text: "Text", found: Sequence[tuple[str, AdapterStats]]) -> None:
    """Kubernetes' inference gateways route by the first family, which has the present combination of labels only."""
    if not found:
        return
    present = []
    for who, stats in found:
        running, waiting = ",".join(stats.running), ",".join(stats.waiting)
        of_stats = labels(max_lora=str(stats.max_loras), running_lora_adapters=running, waiting_lora_adapters=waiting)
        present.append((f"{of_stats},{who}", time.time()))
    name, help_text = names.LORA_INFO
    text.family(name, "gauge", help_text, present)
    for name, help_text, of in names.LORA_COUNTERS:
        text.family(f"{name}_total", "counter", help_text, [(who, of(stats)) for who, stats in found])


def _caches(engine: _LiveEngine) -> bool:
    return engine.cache is None or engine.cache.enable_prefix_caching


def _by_label(engine: str, label: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(f"{engine},{labels(**{label: value})}", number) for value, number in values.items()]


def _frontends(text: "Text", slots: Sequence[float], metrics: Metrics, engine: str, max_model_len: int) -> None:
    reasons = {reason: slots[metrics.counters["request_success", reason]] for reason in names.FINISH_REASONS}
    name, help_text = names.REQUEST_SUCCESS
    text.family(f"{name}_total", "counter", help_text, _by_label(engine, "finished_reason", reasons))
    refused = {code: slots[metrics.counters["requests_refused", code]] for code in names.REFUSALS}
    name, help_text = names.REFUSED
    text.family(f"{name}_total", "counter", help_text, _by_label(engine, "reason", refused))
    for label, (name, help_text) in names.MEDIA.items():
        text.family(f"{name}_total", "counter", help_text, [(engine, slots[metrics.counters["media", label]])])
    for name, (help_text, buckets) in names.HISTOGRAMS.items():
        prefix = names.PREFIXES.get(name, "vllm:")
        start, end = metrics.histograms[name].start, metrics.histograms[name].start + len(buckets) + 1
        counts, total = slots[start:end], slots[end]
        if buckets is names.TOKENS:  # no sequence is longer than max_model_len
            buckets = [bound for bound in buckets if bound <= max_model_len]
            counts = [*counts[: len(buckets)], sum(counts[len(buckets) :])]
        text.histogram(prefix + name, help_text, [(engine if prefix else "", buckets, counts, total)])
    _http(text, slots, metrics.handlers)


def _http(text: "Text", slots: Sequence[float], handlers: Mapping[str, int]) -> None:
    assert len(handlers) <= MAX_HANDLERS
    answers: list[tuple[str, float]] = []
    durations = []
    num_statuses, num_buckets = len(names.STATUSES), len(names.HTTP_SECONDS) + 1
    for handler, index in handlers.items():
        for method, name in enumerate(names.METHODS):
            start = http_slot(index, method)
            counted = slots[start : start + num_statuses]
            if not any(counted):
                continue
            who = labels(handler=handler, method=name)
            answers += [(f"{who},{labels(status=s)}", n) for s, n in zip(names.STATUSES, counted, strict=True) if n]
            start += num_statuses
            buckets = slots[start : start + num_buckets]
            durations.append((who, names.HTTP_SECONDS, buckets, slots[start + num_buckets]))
    text.family(f"{names.HTTP_REQUESTS[0]}_total", "counter", names.HTTP_REQUESTS[1], answers)
    text.histogram(*names.HTTP_DURATION, durations)


def labels(**values: str) -> str:
    """Pairs `name="value"`, separated by commas, without braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Text:
    """Metric families in order. Labels are made by `labels`; an empty string for none."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def encoded(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def family(self, name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
        """Add a family. name: in full, for counters with _total."""
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        self._lines += [f"{_named(name, who)} {_number(value)}" for who, value in samples]

    def histogram(
        self, name: str, help_text: str, series: Iterable[tuple[str, Sequence[float], Sequence[float], float]]
    ) -> None:
        """series: (labels, upper bounds, count of each bucket, sum); counts are not cumulative. A series is left out if the
        number of its counts does not fit its bounds."""
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} histogram"]
        for who, bounds, counts, total in series:
            if len(counts) != len(bounds) + 1:
                continue  # from an engine of another version
            comma = f"{who}," if who else ""
            for bound, count in zip([*map(_bound, bounds), "+Inf"], accumulate(counts), strict=True):
                self._lines.append(f'{name}_bucket{{{comma}le="{bound}"}} {_number(count)}')
            self._lines.append(f"{_named(name + '_count', who)} {_number(sum(counts))}")
            self._lines.append(f"{_named(name + '_sum', who)} {_number(total)}")


def _named(name: str, who: str) -> str:
    return f"{name}{{{who}}}" if who else name


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))


def _bound(value: float) -> str:
    """The bound as prometheus-client writes it: labels are compared as text."""
    return f"{value:.0e}" if value >= 1e6 else repr(float(value))
