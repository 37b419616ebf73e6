"""Percentiles and the summary of one load: pure arithmetic with tests of its own, used by serve.py, hostcost.py and soak.py.

Definitions are those of `vllm bench serve`, so that figures can be compared:
    TTFT  request sent (open loop: due) -> first chunk that carries text      ITL   time between two such chunks of one request
    E2E   request sent (open loop: due) -> last text or finish reason         TPOT  (E2E - TTFT) / (output tokens - 1)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

POINTS = (50, 90, 99)


class RequestResult(NamedTuple):
    """One request as a generator process saw it; times in seconds of the machine's monotonic clock."""

    due: float  # when it should have been sent; when it was, if there was no such time
    sent: float
    first: float  # first chunk with text, 0.0 if none came
    last: float  # last text or finish reason
    prompt_tokens: int
    output_tokens: int
    error: str  # "" for success


def percentiles(values: Sequence[float] | np.ndarray, digits: int = 3) -> dict[str, float]:
    """mean, p50, p90, p99 and max; linear interpolation between order statistics (numpy's default). NaN for no values."""
    array = np.asarray(values, float)
    if not len(array):
        return {name: float("nan") for name in ("mean", "p50", "p90", "p99", "max")}
    found = {f"p{p}": round(float(v), digits) for p, v in zip(POINTS, np.percentile(array, POINTS), strict=True)}
    return {"mean": round(float(array.mean()), digits), **found, "max": round(float(array.max()), digits)}


def summarise(results: Sequence[RequestResult], gaps_s: np.ndarray) -> dict[str, Any]:
    """The figures of one load: ms, tokens and requests a second over the time from the first send to the last end."""
    good = [r for r in results if not r.error]
    failures = [r.error for r in results if r.error]
    out: dict[str, Any] = {"requests": len(results), "failures": len(failures), "errors": sorted(set(failures))[:5]}
    if not good:
        return out
    begin, end = min(r.sent for r in results), max(r.last for r in good)
    seconds = max(end - begin, 1e-9)
    tokens_in, tokens_out = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    several = [r for r in good if r.output_tokens > 1]
    out |= {
        "duration_s": round(seconds, 3),
        "request_s": round(len(good) / seconds, 3),
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "output_tok_s": round(tokens_out / seconds, 1),
        "total_tok_s": round((tokens_in + tokens_out) / seconds, 1),
        "ttft_ms": percentiles([1e3 * (r.first - r.due) for r in good]),
        "itl_ms": percentiles(1e3 * gaps_s),
        "tpot_ms": percentiles([1e3 * (r.last - r.first) / (r.output_tokens - 1) for r in several]),
        "e2e_ms": percentiles([1e3 * (r.last - r.due) for r in good]),
        "send_lag_ms": percentiles([1e3 * (r.sent - r.due) for r in good]),
    }
    return out
