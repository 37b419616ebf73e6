"""`quire bench throughput`, `latency` and `startup`: measure an engine of their own, with the names of `vllm bench`.

Each prints a line or two, and with --output-json writes the figures, under vLLM's keys.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.frontend.cli.bench.datasets import DatasetError, Request, random_requests
from quire.frontend.cli.bench.drafts import HEARTBEAT_S, counts_of_metrics, figures
from quire.frontend.cli.bench.serve import check_writable, requests_of, timed
from quire.frontend.client.llm import LLM
from quire.frontend.launcher import EngineStartError
from quire.ipc.config import EngineConfig, engine_config_from
from quire.ipc.sampling import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
TRITON_CACHE = "TRITON_CACHE_DIR"


def run(args: argparse.Namespace) -> int:
    """Run one of the three, by args.measure. Returns the exit code."""
    try:
        if args.output_json:
            check_writable(Path(args.output_json))  # before minutes of measuring
        config = engine_config_from(args, disable_log_stats=True)
        found = {"throughput": throughput, "latency": latency, "startup": startup}[args.measure](args, config)
    except (DatasetError, EngineStartError, ValueError) as error:
        print(f"quire bench {args.measure}: {error}", file=sys.stderr)
        return 1
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(found, indent=4) + "\n")
    return 0


def engine(config: EngineConfig) -> LLM:
    default = EngineConfig()
    changed = {
        name: getattr(config, name) for name in config.__struct_fields__ if getattr(config, name) != getattr(default, name)
    }
    return LLM(changed.pop("model", None), **changed)


def _generate(llm: LLM, requests: Sequence[Request], args: argparse.Namespace, use_tqdm: bool) -> int:
    """Returns the number of output tokens."""
    sampling = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(args, name, None)) is not None}
    params = [SamplingParams(**{"temperature": 1.0, **sampling}, max_tokens=r.output_len, ignore_eos=True) for r in requests]
    outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=use_tqdm)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def _drafts(llm: LLM, config: EngineConfig) -> dict[str, Any]:
    """How drafts fared since the engine's start, which it prints; {} without speculation."""
    if config.speculative_config is None:
        return {}
    time.sleep(HEARTBEAT_S)
    counts = counts_of_metrics(llm.get_metrics())
    if counts is not None and (said := counts.in_words()):
        print(said[:1].upper() + said[1:])
    return figures(counts)


def throughput(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    requests = requests_of(args)
    with engine(config) as llm:
        tokens_out, seconds = timed(lambda: _generate(llm, requests, args, not args.disable_tqdm))
        drafted = _drafts(llm, config)
    total = sum(r.prompt_len for r in requests) + tokens_out
    found = {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        **drafted,
    }
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s"
    )
    return found


def latency(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    requests = random_requests(args.batch_size, args.input_len, args.output_len, seed=args.seed)
    with engine(config) as llm:
        for _ in range(args.num_iters_warmup):
            _generate(llm, requests, args, False)
        latencies = [timed(lambda: _generate(llm, requests, args, False))[1] for _ in range(args.num_iters)]
        drafted = _drafts(llm, config)
    found: dict[str, Any] = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": _percentiles(latencies),
        **drafted,
    }
    print(f"Avg latency: {found['avg_latency']} seconds")
    for p, value in found["percentiles"].items():
        print(f"{p}% percentile latency: {value} seconds")
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(p): float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def startup(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Measure the time until an engine is ready, and until its first token. Cold: no kernel was compiled before."""
    found: dict[str, Any] = {}
    for kind, count in (("cold", args.num_iters_cold), ("warm", args.num_iters_warm)):
        if not count:
            continue
        both = [_start(config, kind == "cold") for _ in range(count)]
        ready, first = [a for a, _ in both], [b for _, b in both]
        found |= {
            f"avg_{kind}_startup_time": float(np.mean(ready)),
            f"{kind}_startup_times": ready,
            f"{kind}_startup_percentiles": _percentiles(ready),
            f"{kind}_first_token_times": first,
        }
        print(f"{kind}: ready after {np.mean(ready):.2f} s, first token after {np.mean(first):.2f} s (of {count})")
    return found


def _start(config: EngineConfig, cold: bool) -> tuple[float, float]:
    """Seconds until the engine is ready, and until it has generated a token."""
    before = os.environ.get(TRITON_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        if cold:
            os.environ[TRITON_CACHE] = folder
        try:
            llm, ready = timed(lambda: engine(config))
        finally:
            if cold:
                os.environ.pop(TRITON_CACHE)
                if before is not None:
                    os.environ[TRITON_CACHE] = before
        with llm:
            _, first = timed(lambda: llm.generate([[10, 11]], SamplingParams(max_tokens=1), use_tqdm=False))
    return ready, ready + first
