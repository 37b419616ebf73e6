"""The router of `--data-parallel-size` and `quire route`, simulated: hits and times to the first token of each policy.

    python benchmarks/router_sim.py [--replicas 1000] [--requests 100000] [--rate 2] [--seed 0] [--frontends 1]
    python benchmarks/router_sim.py --trace FILE.jsonl [--trace-block-size 512] [--speed 1]
    python benchmarks/router_sim.py --decision [--index-blocks 10000000]

The router is the real one (frontend/replicas/router.py), given token ids. Engines are simulated as an 8B on one H200: prompts
are computed one after the other at PREFILL_TOKENS_S, rows decode meanwhile, the KV cache is an LRU of --cache-blocks. Requests
arrive as a Poisson process from conversations of tenants: tenants' popularity has a Zipf distribution, all conversations of a
tenant begin with the same text, and each turn repeats the conversation so far. Or they come from a trace in Mooncake's format:
timestamp (ms), input_length, output_length, hash_ids. Hits are the fraction of all prompt tokens that was cached; like the
times, they are counted after the first fifth of the requests. Two upper bounds for any router: `unbounded` is one cache for all
that never evicts, `pooled` one as large as all together, and both have an idle engine for each prompt. --decision times the
router alone and reports its index's memory. Each mode prints a table and a last line `RESULT {json}`.
"""

import argparse
import csv
import heapq
import json
import math
import platform
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.frontend.replicas.router import POLICIES, Router
from quire.frontend.replicas.router_index import BlockIndex

# An 8B in bf16 on one H200, as measured: README.md of this folder
PREFILL_TOKENS_S = 44_000
STEP_S, ROW_S = 0.004, 0.00003
STEP_TOKENS = 8192
UNTIMED = 64  # first decisions
WARM_UP = 5  # the first 1/WARM_UP of the requests fills caches and is not counted
COLUMNS = ["date", "workload", "replicas", "requests", "rate", "seed", "cache_blocks", "frontends", "policy", "hits",
           "unbounded_hits", "ttft_ms_p50", "ttft_ms_p99"]  # fmt: skip
TENANT, SESSION = 1 << 50, 1 << 51  # kinds of block ids


class Request(NamedTuple):
    """One prompt. ids: of its full blocks, equal for equal prefixes; ids_after: including the answer's blocks."""

    time_s: float
    num_tokens: int
    num_output: int
    ids: np.ndarray
    ids_after: np.ndarray


class TraceError(Exception):
    """A line of a trace is invalid, and the text names it; or there is no request."""


# ------------------------------------------------------------------------------------------------------------ workloads
def tenants(args: argparse.Namespace) -> list[Request]:
    """Conversations at a steady rate; most of those that run at second 0 began earlier. Raises TraceError."""
    random, size = np.random.default_rng(args.seed), args.block_size
    popularity = 1 / np.arange(1, args.tenants + 1) ** args.zipf
    shared = np.clip(random.lognormal(7.0, 0.8, args.tenants), 64, 8000).astype(int)  # median 1,100 tokens
    seconds, before_s = args.requests / (args.rate * args.replicas), 3 * args.turns * args.think_s
    count = random.poisson((seconds + before_s) * args.rate * args.replicas / args.turns)
    begins = random.uniform(-before_s, seconds, count)
    owners = random.choice(args.tenants, count, p=popularity / popularity.sum())
    requests = []
    for session, (at_s, tenant, turns) in enumerate(zip(begins, owners, random.geometric(1 / args.turns, count), strict=True)):
        length = first = int(shared[tenant])
        said = np.clip(random.lognormal(5.3, 1.0, turns), 4, 16_000).astype(int)  # median 200 tokens
        answers = np.clip(random.lognormal(5.2, 0.8, turns), 8, 2000).astype(int)
        pauses = random.exponential(args.think_s, turns)
        for question, answer, pause in zip(said.tolist(), answers.tolist(), pauses.tolist(), strict=True):
            length += question
            if length > args.max_model_len or at_s >= seconds:
                break
            if at_s >= 0:
                ids, after = (_ids(tenant, first // size, session, n // size) for n in (length, length + answer))
                requests.append(Request(at_s, length, answer, ids, after))
            length += answer
            at_s += pause + answer * STEP_S
    if not requests:
        raise TraceError("no request comes of these options: every prompt is longer than --max-model-len, or there are too few")
    return sorted(requests, key=lambda request: request.time_s)


def _ids(tenant: int, num_shared: int, session: int, num_blocks: int) -> np.ndarray:
    indices = np.arange(num_blocks)
    return np.where(indices < num_shared, TENANT + (tenant << 24), SESSION + (session << 24)) + indices


class _Line(msgspec.Struct):
    """The required fields of a line of a trace; other fields are ignored."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace(path: str, block_size: int, speed: float) -> list[Request]:
    """Raises TraceError, OSError."""
    decoder, requests = msgspec.json.Decoder(_Line), []
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
                _check(line, block_size)
                if not math.isfinite(line.timestamp / speed):
                    raise ValueError("timestamp divided by --speed is no number of seconds")
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, too
                raise TraceError(f"{path}, line {number}: {error}") from None
            ids = np.array(line.hash_ids[: line.input_length // block_size], np.int64)
            requests.append(Request(line.timestamp / 1e3 / speed, line.input_length, line.output_length, ids, ids))
    if not requests:
        raise TraceError(f"{path}: there is no request in it")
    first = min(request.time_s for request in requests)
    return sorted((request._replace(time_s=request.time_s - first) for request in requests), key=lambda r: r.time_s)


def _check(line: _Line, block_size: int) -> None:
    if not (math.isfinite(line.timestamp) and line.timestamp >= 0):
        raise ValueError("timestamp must be milliseconds, at least 0")
    if not (1 <= line.input_length <= 1 << 24 and 0 <= line.output_length <= 1 << 24):
        raise ValueError("input_length must be between 1 and 2^24, output_length between 0 and 2^24")
    if not all(0 <= number < 1 << 63 for number in line.hash_ids):
        raise ValueError("hash_ids must be between 0 and 2^63")
    full = line.input_length // block_size
    if not full <= len(line.hash_ids) <= full + 1:
        raise ValueError(
            f"{line.input_length} tokens in blocks of {block_size} have {full} or {full + 1} hash_ids, not {len(line.hash_ids)}"
        )


# ------------------------------------------------------------------------------------------------------------ simulation
class Cache:
    """An engine's prefix cache: evicts the least recently used blocks first, and a sequence's last blocks before its first."""

    def __init__(self, num_blocks: int | None) -> None:
        self._most = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count(self, ids: list[int]) -> int:
        """How many of the first ids are cached without a gap."""
        return next((i for i, block in enumerate(ids) if block not in self._blocks), len(ids))

    def add(self, ids: list[int]) -> None:
        for block in reversed(ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._most is not None and len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class Engine:
    def __init__(self, num_blocks: int) -> None:
        self.cache = Cache(num_blocks)
        self.num_rows = 0
        self._free_at = 0.0  # when all prompts sent to it are computed

    def compute(self, now: float, num_tokens: int) -> float:
        """When the first token of a prompt arrives that has num_tokens uncached tokens."""
        steps = max(1, math.ceil(num_tokens / STEP_TOKENS))
        self._free_at = max(now, self._free_at) + num_tokens / PREFILL_TOKENS_S + steps * (STEP_S + self.num_rows * ROW_S)
        return self._free_at


class Result(NamedTuple):
    hits: float
    ttft_ms: tuple[float, float]  # median, P99
    decision_us: tuple[float, float]


def simulate(requests: list[Request], policy: str, args: argparse.Namespace) -> Result:
    engines = [Engine(args.cache_blocks) for _ in range(args.replicas)]
    routers = [_router(policy, args, i) for i in range(args.frontends)]
    events: list[tuple[float, int, Callable[[], None]]] = []
    cached, prompts, ttft, decisions = 0, 0, [], []
    counted_from, size = len(requests) // WARM_UP, args.block_size
    for number, request in enumerate(requests):
        while events and events[0][0] <= request.time_s:
            heapq.heappop(events)[2]()
        router, tokens = routers[number % len(routers)], token_ids(request, size)
        began = time.perf_counter()
        choice = router.send(tokens)
        decisions.append(time.perf_counter() - began)
        assert choice is not None
        engine, ids = engines[choice.engine], request.ids.tolist()
        hits = size * engine.cache.count(ids[: (request.num_tokens - 1) // size])
        engine.cache.add(ids)
        first_at = engine.compute(request.time_s, request.num_tokens - hits)
        ended_at = first_at + request.num_output * (STEP_S + engine.num_rows * ROW_S)
        heapq.heappush(events, (first_at, 2 * number, _first(router, choice.engine, choice.num_uncached, engine)))
        heapq.heappush(events, (ended_at, 2 * number + 1, _end(router, choice.engine, engine, request)))
        if number >= counted_from:
            cached, prompts = cached + hits, prompts + request.num_tokens
            ttft.append(first_at - request.time_s)
    return Result(cached / prompts, _percentiles(ttft, 1e3), _percentiles(decisions, 1e6))


def _router(policy: str, args: argparse.Namespace, index: int) -> Router:
    router = Router(args.replicas, policy, block_size=args.block_size, max_blocks=args.index_blocks, seed=args.seed + index)
    for engine in range(args.replicas):
        router.set_capacity(engine, args.cache_blocks)
    return router


def token_ids(request: Request, block_size: int) -> np.ndarray:
    """A prompt with equal blocks for equal ids."""
    tokens = np.zeros(request.num_tokens, np.int64)
    tokens[: len(request.ids) * block_size] = np.repeat(request.ids, block_size)
    return tokens


def _first(router: Router, number: int, num_uncached: int, engine: Engine) -> Callable[[], None]:
    def happen() -> None:
        router.computed(number, num_uncached)
        engine.num_rows += 1

    return happen


def _end(router: Router, number: int, engine: Engine, request: Request) -> Callable[[], None]:
    def happen() -> None:
        router.ended(number, 1)
        engine.num_rows -= 1
        engine.cache.add(request.ids_after.tolist())

    return happen


def with_one_cache(requests: list[Request], num_blocks: int | None, block_size: int) -> tuple[float, tuple[float, float]]:
    """An upper bound for routers: one cache for all engines, and an idle engine for each prompt. Returns hits, TTFT in ms."""
    cache, cached, prompts, ttft = Cache(num_blocks), 0, 0, []
    for number, request in enumerate(requests):
        ids = request.ids.tolist()
        hits = block_size * cache.count(ids[: (request.num_tokens - 1) // block_size])
        cache.add(request.ids_after.tolist())
        if number >= len(requests) // WARM_UP:
            cached, prompts = cached + hits, prompts + request.num_tokens
            ttft.append(Engine(1).compute(0.0, request.num_tokens - hits))
    return cached / prompts, _percentiles(ttft, 1e3)


def _percentiles(values: list[float], unit: float) -> tuple[float, float]:
    low, high = np.percentile(values, [50, 99]) * unit
    return float(low), float(high)


# ------------------------------------------------------------------------------------------------------------- decisions
def decide(args: argparse.Namespace) -> dict[str, Any]:
    """Time decisions for prompts of 8k tokens, half of them known, with a full index."""
    before, random = _resident_mib(), np.random.default_rng(args.seed)
    router = Router(args.replicas, block_size=args.block_size, max_blocks=args.index_blocks, seed=args.seed)
    for engine in range(args.replicas):
        router.set_capacity(engine, args.cache_blocks)
    _fill(router._index, args, random)
    mib = _resident_mib() - before
    beginnings, seconds, cpu_seconds = random.integers(0, 128_000, (64, 4096)), [], []
    for number in range(args.decisions):
        ends = random.integers(0, 128_000, 4096)
        tokens = np.concatenate([beginnings[number % 64], ends]).astype(np.int32)
        began, cpu_began = time.perf_counter(), time.thread_time()
        choice = router.send(tokens, b"salt")
        cpu_seconds.append(time.thread_time() - cpu_began)
        seconds.append(time.perf_counter() - began)
        assert choice is not None
        router.computed(choice.engine, choice.num_uncached)
        router.ended(choice.engine, 1)
    wall, cpu = ([round(us, 1) for us in _percentiles(times[UNTIMED:], 1e6)] for times in (seconds, cpu_seconds))
    return {"decision_us": wall, "decision_cpu_us": cpu, "index_blocks": args.index_blocks, "index_mib": round(mib)}


def _fill(index: BlockIndex | None, args: argparse.Namespace, random: np.random.Generator) -> None:
    assert index is not None
    for number in range(0, 2 * args.index_blocks, 1024):  # twice, to fill every place of the table
        index.add(number % args.replicas, index.look_up(random.integers(0, 1 << 64, 1024, np.uint64)), 0)


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


# ------------------------------------------------------------------------------------------------------------------ main
def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate the router.")
    add = parser.add_argument
    add("--replicas", type=int, default=1000)
    add("--requests", type=int, default=100_000)
    add("--rate", type=float, default=2.0, help="requests a second and replica (default: %(default)s)")
    add("--tenants", type=int, default=3000)
    add("--zipf", type=float, default=1.1, help="exponent of tenants' popularity (default: %(default)s)")
    add("--turns", type=float, default=4.0, help="of a conversation, mean (default: %(default)s)")
    add("--think-s", type=float, default=10.0, help="between an answer and the next turn, mean (default: %(default)s)")
    add("--max-model-len", type=int, default=32_768)
    add("--block-size", type=int, default=64)
    add("--cache-blocks", type=int, default=12_000, help="of each engine (default: %(default)s, what an 8B has on one H200)")
    add("--frontends", type=int, default=1, help="routers that know nothing of each other (default: %(default)s)")
    add("--policies", nargs="+", choices=POLICIES, default=["round-robin", "least-loaded", "cache-aware"])
    add("--trace", metavar="FILE", help="a trace in Mooncake's format instead of conversations")
    add("--trace-block-size", type=int, default=512, help="tokens of a block of the trace (default: %(default)s)")
    add("--speed", type=float, default=1.0, help="play the trace so many times as fast (default: %(default)s)")
    add("--decision", action="store_true", help="time decisions instead")
    add("--decisions", type=int, default=5000)
    add("--index-blocks", type=int, default=10_000_000)
    add("--seed", type=int, default=0)
    add("--csv", type=Path, help="append a row a policy")
    args = parser.parse_args(words)
    for name in ("replicas", "requests", "rate", "tenants", "turns", "block_size", "cache_blocks", "frontends", "speed",
                 "trace_block_size", "index_blocks", "think_s"):  # fmt: skip
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0")
    if not (args.turns >= 1 and args.seed >= 0 and abs(args.zipf) < 100 and args.decisions > UNTIMED):
        parser.error(f"--turns must be at least 1, --seed at least 0, --zipf a number, --decisions more than {UNTIMED}")
    if args.trace is not None:
        tokens, args.block_size = args.cache_blocks * args.block_size, args.trace_block_size
        args.cache_blocks = max(1, tokens // args.block_size)
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    where = {"machine": platform.machine(), "python": platform.python_version(), "replicas": args.replicas, "seed": args.seed}
    if args.decision:
        found = decide(args)
        for name, what in (("decision_us", "wall time"), ("decision_cpu_us", "CPU time, for busy machines")):
            print(f"decision, 8k tokens: median {found[name][0]} us, P99 {found[name][1]} us ({what})")
        print(f"index of {args.index_blocks} blocks: {found['index_mib']} MiB")
        print("RESULT", json.dumps({**where, **found}))
        return 0
    try:
        requests = tenants(args) if args.trace is None else trace(args.trace, args.block_size, args.speed)
    except (TraceError, OSError) as error:
        print(f"router_sim.py: {error}", file=sys.stderr)
        return 1
    found = dict(compare(requests, args))
    print("RESULT", json.dumps({**where, **found}))
    if args.csv is not None:
        append(args, len(requests), found)
    return 0


def append(args: argparse.Namespace, num_requests: int, found: dict[str, Any]) -> None:
    """Append a row per policy."""
    speed = "" if args.speed == 1 else f" x{args.speed:g}"
    what = [
        "conversations" if args.trace is None else Path(args.trace).name + speed,
        args.replicas,
        num_requests,
        args.rate if args.trace is None else "",
        args.seed,
    ]
    what += [args.cache_blocks, args.frontends]
    with args.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if not file.tell():
            writer.writerow(COLUMNS)
        for policy in ("unbounded", "pooled", *args.policies):
            hits, (median, p99) = found[policy]["hits"], found[policy]["ttft_ms"]
            writer.writerow([date.today(), *what, policy, hits, found["unbounded_hits"], round(median, 1), round(p99, 1)])


def compare(requests: list[Request], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    tokens, seconds = sum(request.num_tokens for request in requests), max(requests[-1].time_s, 1e-3)
    load = tokens / PREFILL_TOKENS_S / seconds / args.replicas
    print(f"{len(requests)} requests in {seconds:.0f} s of {tokens / len(requests):.0f} prompt tokens; all computed, they take "
          f"{load:.0%} of {args.replicas} replicas")  # fmt: skip
    print(f"{'':14} {'hits':>6} {'of unbounded':>12} {'TTFT ms':>8} {'P99':>7} {'decision us':>12} {'P99':>7}")
    sizes = {"unbounded": None, "pooled": args.replicas * args.cache_blocks}
    bounds = {name: with_one_cache(requests, num_blocks, args.block_size) for name, num_blocks in sizes.items()}
    best = bounds["unbounded"][0]
    yield "unbounded_hits", round(best, 4)
    for name, (hits, (median, p99)) in bounds.items():
        print(f"{name:14} {hits:6.1%} {hits / best if best else 1:12.2f} {median:8.1f} {p99:7.1f}", flush=True)
        yield name, {"hits": round(hits, 4), "ttft_ms": [round(median, 4), round(p99, 4)]}
    for policy in args.policies:
        found = simulate(requests, policy, args)
        print(f"{policy:14} {found.hits:6.1%} {found.hits / best if best else 1:12.2f} {found.ttft_ms[0]:8.1f} "
              f"{found.ttft_ms[1]:7.1f} {found.decision_us[0]:12.0f} {found.decision_us[1]:7.0f}", flush=True)  # fmt: skip
        yield policy, {name: np.round(value, 4).tolist() for name, value in found._asdict().items()}


if __name__ == "__main__":
    sys.exit(main())
