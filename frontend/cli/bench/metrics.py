"""The figures of a benchmark, under the names of vLLM's result files. Pure arithmetic.

TTFT  sent -> first chunk with text     ITL   between two such chunks of one request
E2EL  sent -> last text or its end      TPOT  (E2EL - TTFT) / (output tokens - 1)
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.frontend.cli.bench import drafts

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


class Result(NamedTuple):
    """One request; times in seconds, on one clock."""

    sent: float
    first: float
    end: float
    gaps: list[float]
    prompt_len: int
    output_len: int
    error: str = ""
    text: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the server had no room for it, or its key none; it counts as failed, too."""
        return self.error.startswith(("429:", "503:", "529:"))

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def latency(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def summary(
    results: Sequence[Result], duration: float, metrics: Sequence[str], percentiles: Sequence[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """goodput: the longest that a request may take to count as good, in ms, by the names of METRICS."""
    good = [r for r in results if not r.error]
    tokens_in, tokens_out = sum(r.prompt_len for r in good), sum(r.output_len for r in good)
    per_s = 1 / duration if duration > 0 else 0.0
    peak_tokens, peak_requests = _peaks(good)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "refused": sum(r.is_refused for r in results),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) * per_s,
        "request_goodput": sum(_is_good(r, goodput) for r in good) * per_s if goodput else None,
        "output_throughput": tokens_out * per_s,
        "total_token_throughput": (tokens_in + tokens_out) * per_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for name in metrics:
        found |= _distribution(name, [1000 * value for value in _values(name, good)], percentiles)
    return found


def _values(name: str, good: Sequence[Result]) -> list[float]:
    match name:
        case "ttft":
            return [r.ttft for r in good]
        case "tpot":
            return [r.tpot for r in good if r.output_len > 1]
        case "itl":
            return [gap for r in good for gap in r.gaps]
        case _:
            return [r.latency for r in good]


def _distribution(name: str, values_ms: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values_ms or [0.0])
    found = {f"mean_{name}_ms": array.mean(), f"median_{name}_ms": np.median(array), f"std_{name}_ms": array.std()}
    found |= {f"p{p:g}_{name}_ms": np.percentile(array, p) for p in percentiles}
    return {key: float(value) for key, value in found.items()}


def _is_good(result: Result, goodput: dict[str, float]) -> bool:
    took = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
    return all(1000 * took[name] <= limit for name, limit in goodput.items())


def _peaks(good: Sequence[Result]) -> tuple[float, int]:
    """The most output tokens in one second, and the most requests at once."""
    if not good:
        return 0.0, 0
    begin = min(r.sent for r in good)
    seconds = math.ceil(max(r.end for r in good) - begin) + 1
    tokens = np.zeros(seconds)
    for r in good:
        times = r.first - begin + np.cumsum([0.0, *r.gaps])
        np.add.at(tokens, np.minimum(times.astype(int), seconds - 1), r.output_len / len(times))
    changes = sorted([(r.sent, 1) for r in good] + [(r.end, -1) for r in good])
    return float(tokens.max()), int(np.cumsum([change for _, change in changes]).max())


def report(found: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as text, under vLLM's names."""
    named = [
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Refused requests:", "refused"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ]
    rows = [(title, found[name]) for title, name in named if found.get(name) is not None]
    lines = [f"{'quire bench serve':=^50}", *map(_line, rows)]
    for name in metrics:
        short = name.upper()
        lines.append(f"{METRICS[name]:-^50}")
        lines += [_line((f"{kind.title()} {short} (ms):", found[f"{kind}_{name}_ms"])) for kind in ("mean", "median")]
        lines += [_line((f"P{p:g} {short} (ms):", found[f"p{p:g}_{name}_ms"])) for p in percentiles]
    if of_drafts := drafts.rows(found):
        lines += [f"{'Speculative Decoding':-^50}", *map(_line, of_drafts)]
    return "\n".join([*lines, "=" * 50])


def outcome(found: dict[str, Any]) -> str:
    """How the requests ended, in one line."""
    good, failed, refused = (found[name] for name in ("completed", "failed", "refused"))
    return f"{good + failed} requests: {good} completed, {failed} failed, {refused} of them refused (503, 429)"


def _line(row: tuple[str, Any]) -> str:
    name, value = row
    return f"{name:<40} {value:<9.2f}".rstrip() if isinstance(value, float) else f"{name:<40} {value}"
