"""An engine's figures for scripts, as vLLM's `LLM.get_metrics()` returns them: objects with a name and a value.

They come with the engine's heartbeat, twice a second. The names are those of /metrics, which has more of them.
"""

import time
from dataclasses import dataclass, field

from quire.frontend.client.client import Client
from quire.ipc.messages.stats import SpeculationStats

FIRST_HEARTBEAT_S = 2.0  # an engine sends one every half second


@dataclass(frozen=True)
class Metric:
    """name: as at /metrics. labels: the model's name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gauge(Metric):
    """A value of now."""

    value: float = 0.0


@dataclass(frozen=True)
class Counter(Metric):
    """A total since the engine's start."""

    value: int = 0


@dataclass(frozen=True)
class Vector(Metric):
    """Totals since the engine's start, by an index."""

    values: list[int] = field(default_factory=list)


def engine_metrics(client: Client) -> list[Metric]:
    """Waits for the engine's first heartbeat, at most FIRST_HEARTBEAT_S; [] without one. Not for the client's own thread.

    Raises EngineDown if the client has never been connected.
    """
    labels, deadline = {"model_name": client.welcome.served_model_names[0]}, time.monotonic() + FIRST_HEARTBEAT_S
    while (beat := client.heartbeat) is None:
        if time.monotonic() > deadline:
            return []
        time.sleep(0.01)
    return [
        Gauge("vllm:num_requests_running", labels, float(beat.num_running)),
        Gauge("vllm:num_requests_waiting", labels, float(beat.num_waiting)),
        Gauge("vllm:kv_cache_usage_perc", labels, beat.kv_usage),
        Counter("vllm:prompt_tokens", labels, beat.prompt_tokens),
        Counter("vllm:prefix_cache_hits", labels, beat.cached_tokens),
        Counter("vllm:generation_tokens", labels, beat.generation_tokens),
        Counter("vllm:num_preemptions", labels, beat.preemptions),
        *(_of_speculation(labels, beat.stats.speculation) if beat.stats and beat.stats.speculation else ()),
    ]


def _of_speculation(labels: dict[str, str], stats: SpeculationStats) -> list[Metric]:
    return [
        Counter("vllm:spec_decode_num_drafts", labels, stats.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", labels, stats.draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", labels, stats.accepted_tokens),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, stats.accepted_by_place),
    ]
