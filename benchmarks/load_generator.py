"""A load: its requests, their times, and the processes that send them. Used by serve.py; the client itself is sse_client.py.

Lengths, prompts and arrival times depend only on the seed, so every engine gets the same ones. A load's requests are
distributed over several processes, each with its own event loop and its share of the connections; all start at one instant of
the machine's monotonic clock. In a closed loop a connection sends its next request when the last has ended. In an open loop
(Poisson) requests have due times and do not wait for others: times count from when a request was due, so the delays of a slow
generator count, too.
"""

import asyncio
import base64
import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvloop
from load_stats import RequestResult, summarise
from sse_client import Connections, Target, clock

MAX_ID = 30_000
FIRST_ID = 10
START_DELAY_S = 0.3  # from when all processes are ready to the first request
WAKE_EARLY_S = 2e-3  # the loop's timers have a resolution of a millisecond: for the rest, turns of the loop are taken
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be")


@dataclass(frozen=True)
class Load:
    """kind: closed (concurrency requests at a time) or poisson (rate requests a second)."""

    kind: str
    concurrency: int
    rate: float
    num_requests: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0

    @property
    def name(self) -> str:
        return f"poisson:{self.rate:g}" if self.kind == "poisson" else f"closed:{self.concurrency}"

    @classmethod
    def parse(cls, text: str, input_len: int, output_len: int, range_ratio: float) -> "Load":
        """`closed:256:2000`, `poisson:20:600`, `single:1:12`, each optionally with `:IN:OUT`. Raises ValueError.

        `single` is `closed` with fixed lengths: a median of a dozen requests of different lengths would say little.
        """
        kind, *numbers = text.split(":")
        if kind not in ("closed", "poisson", "single") or len(numbers) not in (2, 4):
            raise ValueError(f"{text!r}: a load is closed:CONCURRENCY:REQUESTS, poisson:RATE:REQUESTS or single:1:REQUESTS")
        if len(numbers) == 4:
            input_len, output_len = int(numbers[2]), int(numbers[3])
        first, count = float(numbers[0]), int(numbers[1])
        if first <= 0 or count < 1:
            raise ValueError(f"{text!r}: numbers must be positive")
        poisson = kind == "poisson"
        return cls(
            "poisson" if poisson else "closed", 0 if poisson else int(first), first if poisson else 0.0, count, input_len,
            output_len, 0.0 if kind == "single" else range_ratio,
        )  # fmt: skip

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request, uniform in [length (1 - ratio), length (1 + ratio)]."""
        rng = np.random.default_rng((seed, 1))

        def draw(length: int) -> list[int]:
            low, high = int(length * (1 - self.range_ratio)), int(np.ceil(length * (1 + self.range_ratio)))
            return rng.integers(max(low, 1), max(high, 1) + 1, self.num_requests).tolist()

        return list(zip(draw(self.input_len), draw(self.output_len), strict=True))

    def due(self, seed: int) -> list[float]:
        """Seconds from the start at which each request is due; empty in a closed loop."""
        if self.kind != "poisson":
            return []
        gaps = np.random.default_rng((seed, 2)).exponential(1 / self.rate, self.num_requests)
        return np.cumsum(gaps).tolist()


@dataclass(frozen=True)
class Options:
    """The options of all requests. urls: several frontends, each used by some of the processes, instead of `url`."""

    url: str
    model: str
    endpoint: str = "completions"  # or chat
    temperature: float = 1.0
    ignore_eos: bool = True
    vocab_size: int = MAX_ID
    api_key: str | None = None
    timeout_s: float = 600.0
    seed: int = 0
    processes: int = 4
    urls: tuple[str, ...] = ()

    @property
    def target(self) -> Target:
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        return Target.of(self.url, path, self.api_key)


def body_of(options: Options, index: int, n_in: int, n_out: int) -> bytes:
    """The JSON of request `index`: a prompt of n_in random ids, or about as many words for chat, and n_out output tokens."""
    rng = np.random.default_rng((options.seed, 3, index))
    common: dict[str, Any] = {
        "model": options.model,
        "max_tokens": n_out,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.endpoint == "chat":
        text = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), n_in))
        return json.dumps({"messages": [{"role": "user", "content": text}], **common}).encode()
    ids = rng.integers(FIRST_ID, min(MAX_ID, options.vocab_size), n_in).tolist()
    return json.dumps({"prompt": ids, **common}).encode()


@dataclass(frozen=True)
class Share:
    """One process's share of a load: (index, prompt tokens, output tokens, due time or None) per request."""

    options: Options
    requests: list[tuple[int, int, int, float | None]]
    concurrency: int


class Generator:
    """One process's connections and the results of its requests."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.target = share.options.target
        self.results: list[RequestResult] = []
        self.gaps: list[float] = []
        self._connections = Connections(self.target)
        self._requests = [
            (self.target.request(body_of(share.options, index, n_in, n_out)), n_in, n_out, due)
            for index, n_in, n_out, due in share.requests
        ]

    async def run(self, start: float) -> None:
        """Send all requests from `start` on (by `clock`), when all processes begin. A closed loop connects before."""
        for _ in range(self.share.concurrency):
            with contextlib.suppress(OSError):  # the request that needs it will report the error
                await self._connections.open()
        await _wait_until(start)
        if self.share.concurrency:
            left = iter(self._requests)
            await asyncio.gather(*(self._one_by_one(left) for _ in range(self.share.concurrency)))
        else:
            tasks = []
            for data, n_in, n_out, offset in self._requests:
                assert offset is not None
                await _wait_until(start + offset)
                tasks.append(asyncio.create_task(self._ask(data, n_in, n_out, start + offset)))
            await asyncio.gather(*tasks)
        self._connections.abort()

    async def _one_by_one(self, requests: Iterator[tuple[bytes, int, int, float | None]]) -> None:
        for data, n_in, n_out, _ in requests:
            await self._ask(data, n_in, n_out, None)

    async def _ask(self, data: bytes, n_in: int, n_out: int, due: float | None) -> None:
        begin = clock()
        answer = await self._connections.ask(data, self.share.options.timeout_s)
        tokens_out = answer.output_tokens or n_out
        if not answer.error and self.share.options.ignore_eos and tokens_out != n_out:
            answer.error = f"{tokens_out} tokens came where {n_out} were asked for"
        sent = due if due is not None else begin
        self.results.append(
            RequestResult(sent, answer.sent, answer.first, answer.end, answer.prompt_tokens or n_in, tokens_out, answer.error)
        )
        if not answer.error:
            self.gaps += answer.gaps


async def _wait_until(when: float) -> None:
    if (early := when - clock() - WAKE_EARLY_S) > 0:
        await asyncio.sleep(early)
    while clock() < when:
        await asyncio.sleep(0)


def _generate(pipe: multiprocessing.connection.Connection, share: Share) -> None:
    """A generator process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    generator = Generator(share)
    gc.collect()
    gc.disable()  # a pause would count as the server's; a run leaves few cycles
    pipe.send("ready")
    start = pipe.recv()
    cpu, wall = time.process_time(), clock()
    uvloop.run(generator.run(start))
    cpu, wall = time.process_time() - cpu, clock() - wall
    gaps = base64.b64encode(np.asarray(generator.gaps, np.float32).tobytes()).decode()
    pipe.send((list(map(tuple, generator.results)), gaps, cpu, wall))


def run_load(load: Load, options: Options) -> dict[str, Any]:
    """Run one load. The summary of load_stats.summarise, and the generator's own cost (us of CPU a chunk, busiest)."""
    lengths, due = load.lengths(options.seed), load.due(options.seed)
    urls = options.urls or (options.url,)
    count = max(1, min(max(options.processes, len(urls)), load.num_requests, load.concurrency or load.num_requests))
    rows = [(i, n_in, n_out, due[i] if due else None) for i, (n_in, n_out) in enumerate(lengths)]
    context = multiprocessing.get_context("spawn")
    children = []
    try:
        for i in range(count):
            concurrency = load.concurrency // count + (i < load.concurrency % count)
            mine, theirs = context.Pipe()
            share = Share(replace(options, url=urls[i % len(urls)]), rows[i::count], concurrency)
            child = context.Process(target=_generate, args=(theirs, share), daemon=True)
            child.start()
            theirs.close()
            children.append((child, mine))
        for _, pipe in children:
            pipe.recv()
        start = clock() + START_DELAY_S
        for _, pipe in children:
            pipe.send(start)
        parts = [pipe.recv() for _, pipe in children]
        for child, _ in children:
            child.join(10)
    except EOFError:
        raise RuntimeError("a generator process ended early; its messages are above") from None
    finally:
        for child, _ in children:
            child.kill()
    results = [RequestResult(*r) for part in parts for r in part[0]]
    gaps = np.concatenate([np.frombuffer(base64.b64decode(part[1]), np.float32) for part in parts])
    chunks = len(gaps) + sum(not r.error for r in results)
    cpu = sum(part[2] for part in parts)
    return {
        "load": load.name,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "range_ratio": load.range_ratio,
        **summarise(results, gaps),
        "generator": {
            "processes": count,
            "us_per_chunk": round(1e6 * cpu / max(chunks, 1), 2),
            "busiest": round(max(part[2] / part[3] for part in parts), 3),
        },
    }
