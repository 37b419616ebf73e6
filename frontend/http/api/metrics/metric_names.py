"""The metrics at /metrics: names, help texts, buckets, and how the engine's values are read from a heartbeat.

Metrics that vLLM has too are under `vllm:`, with its names, labels (`model_name`, `engine`) and buckets, so its boards,
autoscalers and gateways work unchanged (vllm/v1/metrics/loggers.py of 0.26 is the source); others are under `quire:`.
docs/metrics.md lists all, and those of vLLM's that are missing. metrics.py counts, metrics_text.py writes the text.
"""

from collections.abc import Callable, Sequence

from quire.ipc.messages.frontend import Heartbeat
from quire.ipc.messages.stats import (
    BATCH_FILL,
    HOST_SECONDS,
    ITERATION_TOKENS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    AdapterStats,
    Distribution,
    EngineStats,
    SpeculationStats,
)

FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH", "other")
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

# Upper bounds of histogram buckets.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS = tuple(m * 10**e for e in range(8) for m in (1, 2, 5))  # written up to the model's longest sequence
_COUNTS = (1, 2, 5, 10, 20)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# buckets of prometheus-fastapi-instrumentator, which vLLM uses
HTTP_SECONDS = (0.1, 0.5, 1)
_HTTP_SECONDS_HIGHR = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
)  # fmt: skip

# Histograms that frontends count: name, without the prefix of `PREFIXES`: (help, buckets)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per output token after the first, by request.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens by request.", TOKENS),
    "request_generation_tokens": ("Output tokens by request, over all its choices.", TOKENS),
    "request_max_num_generation_tokens": ("Output tokens of a request's longest choice.", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens by request that were not found in the prefix cache.", TOKENS),
    "request_params_n": ("The parameter n.", _COUNTS),
    "request_params_max_tokens": ("The parameter max_tokens.", TOKENS),
    "frontend_lag_seconds": ("How late a timer of a frontend's event loop is.", _LAG_SECONDS),
    "http_request_duration_highr_seconds": ("From a complete request to the end of its answer.", _HTTP_SECONDS_HIGHR),
}
PREFIXES = {"frontend_lag_seconds": "quire:", "http_request_duration_highr_seconds": ""}  # all others have "vllm:"
REQUEST_SUCCESS = ("vllm:request_success", "Sequences that ended, by reason.")
REFUSED = ("quire:requests_refused", "Requests that were refused or given up, by the error's code.")
MEDIA = {  # what frontends count of images: label -> name and help
    "queries": ("vllm:mm_cache_queries", "Images that were looked up among those preprocessed before."),
    "hits": ("vllm:mm_cache_hits", "Images that were preprocessed before."),
}
REFUSALS = ("overloaded", "rate_limit_exceeded", "deadline_exceeded", "engine_down")
HTTP_REQUESTS = ("http_requests", "Requests by handler, method and status.")
HTTP_DURATION = ("http_request_duration_seconds", "From a complete request to the end of its answer, by handler and method.")

# Gauges of the engine: name, help, and the value in the last Heartbeat.
GAUGES: tuple[tuple[str, str, Callable[[Heartbeat], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda b: b.num_running),
    ("vllm:num_requests_waiting", "Sequences that wait to run.", lambda b: b.num_waiting),
    ("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", lambda b: b.kv_usage),
    ("quire:states", "Recurrent states; 0 if the model has none.", lambda b: b.num_states),
    ("quire:states_used", "Recurrent states of running sequences.", lambda b: b.states_used),
    ("quire:oldest_step_seconds", "Age of the oldest step in flight.", lambda b: b.oldest_step_s),
)
COUNTERS: tuple[tuple[str, str, Callable[[Heartbeat], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens processed, those found in the prefix cache included.", lambda b: b.prompt_tokens),
    ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda b: b.cached_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda b: b.generation_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda b: b.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda b: b.cached_tokens),
    ("vllm:num_preemptions", "Preemptions.", lambda b: b.preemptions),
    ("quire:worker_restarts", "Restarts of the engine's workers.", lambda b: b.worker_restarts),
    ("quire:num_replays", "Requests that ran again, as their workers or engine had died.", lambda b: b.replays),
    ("quire:num_replays_given_up", "Requests that ended as the likely cause of two deaths.", lambda b: b.replays_given_up),
    # vLLM has them for every model; there is no such cache here
    ("vllm:external_prefix_cache_queries", "Tokens looked up in other engines' caches: none.", lambda b: 0),
    ("vllm:external_prefix_cache_hits", "Tokens found in other engines' caches: none.", lambda b: 0),
)
# Gauges of engines that have such a value; others have no samples.
OPTIONAL_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float | None]], ...] = (
    ("quire:expert_parallel_imbalance", "Tokens of the busiest rank's experts by the mean rank's, lately; 1 is even.",
     lambda s: None if s.experts is None else s.experts.imbalance),
)  # fmt: skip
# Counters of engines that speculate; others have no samples.
DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[SpeculationStats], float]], ...] = (
    ("vllm:spec_decode_num_drafts", "Sequences with drafts, summed over steps.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", lambda s: s.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", lambda s: s.accepted_tokens),
)
# Gauges with one more label: name, help, label, and values by label value
LABELLED_GAUGES: tuple[tuple[str, str, str, Callable[[Heartbeat], dict[str, float]]], ...] = (
    ("vllm:num_requests_waiting_by_reason", "Sequences that wait: for room, or for what must be ready first.", "reason",
     lambda b: _waiting(b.num_waiting, b.stats)),
    ("quire:tenant_requests_waiting", "Sequences that wait, by API key or name.", "tenant",
     lambda b: {t.label: t.num_waiting for t in b.stats.tenants} if b.stats is not None else {}),
    ("quire:tenant_requests_running", "Sequences that run, by API key or name.", "tenant",
     lambda b: {t.label: t.num_running for t in b.stats.tenants} if b.stats is not None else {}),
    ("vllm:engine_sleep_state", "The engine is always awake.", "sleep_state",
     lambda b: {"awake": 1, "weights_offloaded": 0, "discard_all": 0}),
)  # fmt: skip
LABELLED_COUNTERS: tuple[tuple[str, str, str, Callable[[Heartbeat], dict[str, float]]], ...] = (
    ("vllm:prompt_tokens_by_source", "Prompt tokens by where their KV comes from.", "source",
     lambda b: {"local_compute": b.prompt_tokens - b.cached_tokens, "local_cache_hit": b.cached_tokens,
                "external_kv_transfer": 0}),
    ("quire:expert_parallel_tokens", "Tokens that a rank's experts got, over all layers.", "rank",
     lambda b: _by_rank(b.stats)),
    ("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were accepted, by their place in a window.", "position",
     lambda b: _by_place(b.stats)),
)  # fmt: skip
ENGINE_HISTOGRAMS: tuple[tuple[str, str, Sequence[float], Callable[[EngineStats], Distribution]], ...] = (
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", ITERATION_TOKENS, lambda s: s.iteration_tokens),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_SECONDS, lambda s: s.inter_token),
    ("quire:step_time_seconds", "From a step's start to its result.", STEP_SECONDS, lambda s: s.step_time),
    ("quire:host_time_seconds", "What the engine core's loop spends on a step.", HOST_SECONDS, lambda s: s.host_time),
    ("quire:mask_time_seconds", "To compute the grammar masks of a step that has some.", HOST_SECONDS, lambda s: s.mask_time),
    ("quire:batch_fill_ratio", "Rows of a step as a part of --max-num-seqs.", BATCH_FILL, lambda s: s.batch_fill),
)


def _by_rank(stats: EngineStats | None) -> dict[str, float]:
    if stats is None or stats.experts is None:
        return {}
    return {str(rank): tokens for rank, tokens in enumerate(stats.experts.tokens)}


def _by_place(stats: EngineStats | None) -> dict[str, float]:
    if stats is None or stats.speculation is None:
        return {}
    return {str(place): tokens for place, tokens in enumerate(stats.speculation.accepted_by_place)}


def _waiting(num_waiting: int, stats: EngineStats | None) -> dict[str, float]:
    deferred = stats.num_deferred if stats is not None else 0
    return {"capacity": num_waiting - deferred, "deferred": deferred}


# ------------------------------------------------------------------------------------------------------ LoRA adapters
LORA_INFO = ("vllm:lora_requests_info", "Adapters of running and waiting sequences; the value is the time.")
LORA_COUNTERS: tuple[tuple[str, str, Callable[[AdapterStats], float]], ...] = (
    ("quire:lora_loads", "Adapters that were loaded into a slot on the device.", lambda s: s.loads),
    ("quire:lora_evictions", "Adapters that gave their slot to another one.", lambda s: s.evictions),
    ("quire:lora_load_seconds", "Seconds that loads into slots took.", lambda s: s.load_s),
)
