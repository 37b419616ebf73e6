"""EngineStats: the core's counts about its steps, which travel to frontends with each Heartbeat.

The distributions' bounds are here, for the core, which counts (enginecore/stats.py), and for frontends, which show them at
/metrics. All are totals since the engine's start, so that nothing is missing after a lost Heartbeat.
"""

from collections.abc import Sequence

import msgspec

from quire.ipc.process.usage import ProcessUsage

# Upper bounds, inclusive; one more bucket is above the last bound.
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's
STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
HOST_SECONDS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # vLLM's
BATCH_FILL = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Distribution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Observations by bucket (not cumulative; the last bucket is above all bounds), and the sum of their values."""

    counts: list[int]
    sum: float

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> "Distribution":
        return cls([0] * (len(bounds) + 1), 0.0)


class ExpertTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's count since it was last asked, over all layers: a token that k experts of a layer get counts k times."""

    by_rank: list[int]
    busiest: int  # tokens of each layer's busiest rank, summed over layers


class ExpertStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Load of the ranks under expert parallelism."""

    tokens: list[int]  # by rank, over all layers; a token that k experts of a layer get counts k times
    imbalance: float  # recent: tokens of each layer's busiest rank, summed over layers, divided by the mean rank's; 1 is even


class TenantStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sequences of one tenant, or of several under one label."""

    label: str
    num_waiting: int
    num_running: int


class SpeculationStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Drafts that were verified, since the engine's start."""

    num_drafts: int  # rows with at least one draft
    draft_tokens: int
    accepted_by_place: list[int]  # [i]: rows with at least i + 1 drafts accepted; as long as a row may have drafts

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_place)

    def since(self, before: "SpeculationStats") -> "SpeculationStats":
        """The counts between `before` and these."""
        by_place = [b - a for a, b in zip(before.accepted_by_place, self.accepted_by_place, strict=True)]
        return SpeculationStats(self.num_drafts - before.num_drafts, self.draft_tokens - before.draft_tokens, by_place)

    def in_words(self) -> str:
        """Mean accepted length (tokens that a step gave a row with drafts), and acceptance by place; "" without drafts."""
        if not self.num_drafts:
            return ""
        shares = [f"{n / self.num_drafts:.0%}" for n in self.accepted_by_place if n] or ["0%"]
        return f"accepted length {1 + self.accepted_tokens / self.num_drafts:.2f}, drafts accepted by place {' '.join(shares)}"


class EngineStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals of one engine since its start."""

    num_deferred: int  # sequences that wait for a preparation (a grammar), part of Heartbeat.num_waiting
    iteration_tokens: Distribution  # tokens computed in a step
    step_time: Distribution  # seconds from a step's start to its result; between results while steps follow each other
    host_time: Distribution  # seconds of the core's loop for one step: update, schedule, publish
    mask_time: Distribution  # seconds to compute a step's grammar masks, if it has some
    batch_fill: Distribution  # rows of a step, divided by max_num_seqs
    inter_token: Distribution  # seconds between two tokens of a sequence, streamed or not
    processes: list[ProcessUsage] = []  # the core's and its workers'
    experts: ExpertStats | None = None  # None: no expert parallelism
    tenants: list[TenantStats] = []  # those with a label that have requests
    speculation: SpeculationStats | None = None  # None: no speculation


class AdapterStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Adapters of one engine: those of running and of waiting sequences now, at most 64 names of each, and totals."""

    max_loras: int
    running: list[str]
    waiting: list[str]
    loads: int  # into an adapter slot
    evictions: int  # from one, for another adapter
    load_s: float  # seconds of all loads


class CacheInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The labels of vLLM's metric `cache_config_info`, about the KV cache. Fixed when an engine starts."""

    block_size: int  # tokens
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    cache_dtype: str
