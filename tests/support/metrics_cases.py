"""An engine with values for all statistics, for tests of /metrics, and the samples of its text."""

import os
import time

import fake_client as http
from prometheus_client.parser import text_string_to_metric_families

from quire.ipc.messages.frontend import Heartbeat, Welcome
from quire.ipc.messages.stats import (
    BATCH_FILL,
    HOST_SECONDS,
    ITERATION_TOKENS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    AdapterStats,
    CacheInfo,
    Distribution,
    EngineStats,
    ExpertStats,
    SpeculationStats,
    TenantStats,
)
from quire.ipc.process.usage import process_usage


def spread(bounds, *counts) -> Distribution:
    return Distribution([*counts, *[0] * (len(bounds) + 1 - len(counts))], 1.5)


ADAPTERS = AdapterStats(2, ["sql", "fr"], ["de"], 5, 3, 0.25)


def engine_stats(**changes) -> EngineStats:
    return EngineStats(
        **{
            "num_deferred": 1,
            "iteration_tokens": spread(ITERATION_TOKENS, 2, 3),
            "step_time": spread(STEP_SECONDS, 1),
            "host_time": spread(HOST_SECONDS, 1),
            "mask_time": spread(HOST_SECONDS),
            "batch_fill": spread(BATCH_FILL, *[0] * len(BATCH_FILL), 4),
            "inter_token": spread(TOKEN_SECONDS, 0, 5),
            "processes": [process_usage(os.getpid(), "engine")],
            "experts": ExpertStats([300, 100], 1.5),
            "tenants": [TenantStats("chat", 3, 2), TenantStats("key-0a1b2c3d", 0, 1)],
            "speculation": SpeculationStats(10, 25, [8, 3, 1]),
            **changes,
        }
    )


class FullClient(http.FakeClient):
    """Of an engine that says everything."""

    def __init__(self) -> None:
        super().__init__()
        fields = {name: getattr(self.welcome, name) for name in Welcome.__struct_fields__}
        self.welcome = Welcome(**{**fields, "cache": CacheInfo(16, 1000, True, 0.9, "auto")})
        self.set_heartbeat()

    def set_heartbeat(self, **stats) -> None:
        self.heartbeat = Heartbeat(1, 0.0, 3, 4, 0.25, 100, 40, 50, 2, 1, True, engine_stats(**stats), adapters=ADAPTERS)
        self.heartbeat_time = time.monotonic()


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and its labels in order, as prometheus-client's parser reads them."""
    return {
        s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
