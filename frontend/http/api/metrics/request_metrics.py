"""What one request adds to the metrics: at its first token, and when it is over. Called by generate.py, never by token."""

from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.prompt_run import PromptRun


def count_first_token(metrics: Metrics, run: PromptRun) -> None:
    """Once a request, as soon as its first token is seen: an answer may take minutes more."""
    times = run.stream.metrics
    if run.has_begun or times.first_token_time is None:
        return
    run.has_begun = True
    metrics.observe("time_to_first_token_seconds", max(0.0, times.first_token_time - times.arrival_time))


def count_request(metrics: Metrics, run: PromptRun) -> None:
    """The times and sizes of a request that is over and has begun to answer."""
    times, stream = run.stream.metrics, run.stream
    if times.first_token_time is None:
        return
    count_first_token(metrics, run)
    first = times.first_token_time
    last = max(times.last_token_time or first, first)
    end = times.finished_time or last
    metrics.observe("e2e_request_latency_seconds", max(0.0, end - times.arrival_time))  # less, where the clock was set back
    metrics.observe("request_decode_time_seconds", last - first)
    if times.queue_s is not None:
        prefill_s = max(0.0, first - times.arrival_time - times.queue_s)
        metrics.observe("request_queue_time_seconds", times.queue_s)
        metrics.observe("request_prefill_time_seconds", prefill_s)
        metrics.observe("request_inference_time_seconds", prefill_s + last - first)
    longest = max(run.num_tokens)
    if longest > 1:
        metrics.observe("request_time_per_output_token_seconds", (last - first) / (longest - 1))
    metrics.observe("request_prompt_tokens", stream.num_prompt_tokens)
    metrics.observe("request_prefill_kv_computed_tokens", stream.num_prompt_tokens - (stream.num_cached_tokens or 0))
    metrics.observe("request_generation_tokens", sum(run.num_tokens) + run.num_tokens_left_out)
    metrics.observe("request_max_num_generation_tokens", longest)
    metrics.observe("request_params_n", run.params.n)
    if run.params.max_tokens is not None:
        metrics.observe("request_params_max_tokens", run.params.max_tokens)
