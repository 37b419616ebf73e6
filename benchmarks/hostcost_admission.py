"""The scheduler's worst call times when many requests arrive at once: `hostcost.py --admission`.

Scheduler and intake alone, with made-up results: no rings, no ZeroMQ, no GPU. In each scenario 64 rows already decode, with a
GPU's defaults (8,192 tokens a step, blocks of 64, 1,024 slots); then all its requests arrive, and steps are made, two in
flight, until the last of them has its first token. Times are the thread's CPU time: other processes do not count.

    accept     one AddRequest to its sequences
    schedule   the next step; target: at most 5 ms, whatever arrives, since every sequence's next token waits for it
    update     one step's results
    steps      until the last request of the scenario had its first token
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.enginecore.garbage import keep_pauses_short
from quire.enginecore.intake import Intake, IntakeConfig
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import AddRequest, EngineLimits, Generate, RequestError, TokenInputs
from quire.ipc.messages.workers import FullAttention
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.samples import Samples

BLOCK_SIZE, BUDGET, MAX_MODEL_LEN, VOCAB_SIZE = 64, 8192, 131072, 128256
MAX_NUM_SEQS, NUM_DECODE, MAX_NUM_WAITING = 1024, 64, 1 << 20
MAX_STEPS = 2000
PLAIN = SamplingParams(max_tokens=200, ignore_eos=True)
PENALTY = SamplingParams(max_tokens=200, ignore_eos=True, repetition_penalty=1.1)
clock = time.thread_time_ns
Requests = list[tuple[np.ndarray, SamplingParams]]


@dataclass
class Scenario:
    requests: Requests
    before: Requests = field(default_factory=list)  # these have already run: their prompts are cached
    num_blocks: int = 20_000


def scenarios() -> Iterator[tuple[str, Scenario]]:
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int, prefix: np.ndarray | None = None, params: SamplingParams = PLAIN) -> Requests:
        first = np.zeros(0, np.int32) if prefix is None else prefix
        tails = rng.integers(10, VOCAB_SIZE, (count, length)).astype(np.int32)
        return [(np.concatenate([first, tail]), params) for tail in tails]

    shared = prompts(1, 60_000)[0][0]
    yield "300 behind one new prefix of 60k", Scenario(prompts(300, 100, shared))
    yield "300 behind a cached prefix of 60k", Scenario(prompts(300, 100, shared), before=[(shared, PLAIN)])
    yield "64 of 60k, all different", Scenario(prompts(64, 60_000))
    yield "1024 of 64 tokens", Scenario(prompts(1024, 64))
    yield "1024 of 4 tokens", Scenario(prompts(1024, 4))
    yield "1024 of 4 tokens, memory is short", Scenario(prompts(1024, 4), num_blocks=6000)
    yield "8192 of 64 tokens", Scenario(prompts(8192, 64))
    yield "8192 behind one new prefix of 600", Scenario(prompts(8192, 9, shared[:600]))
    yield "64 with n = 128", Scenario(prompts(64, 1000, params=SamplingParams(n=128, max_tokens=100)))
    yield "20 plain behind 1000 with a penalty", Scenario(prompts(1000, 64, params=PENALTY) + prompts(20, 64))


class Engine:
    """Scheduler and intake; every row of every step samples token 7."""

    def __init__(self, num_blocks: int):
        self.scheduler = Scheduler(
            SchedulerConfig(
                MAX_NUM_SEQS, BUDGET, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, (FullAttention(),), vocab_size=VOCAB_SIZE
            )
        )
        limits = EngineLimits(MAX_MODEL_LEN, VOCAB_SIZE, MAX_NUM_SEQS, 20)
        config = IntakeConfig(limits, (), True, False, 0, MAX_NUM_WAITING)
        self._intake = Intake(config, self.scheduler.kv.hasher)
        self._in_flight: deque[ScheduledStep] = deque()
        self._num_requests = 0
        self.seen: set[int] = set()  # keys of sequences that had a token
        self.millis: dict[str, list[float]] = {}

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = clock()
        result = call(*args)
        self.millis.setdefault(name, []).append((clock() - begin) / 1e6)
        return result

    def add(self, prompt: np.ndarray, params: SamplingParams) -> list[Sequence]:
        self._num_requests += 1
        request = AddRequest(0, self._num_requests, TokenInputs(prompt.tobytes()), Generate(params))
        accepted = self._timed("accept", self._intake.accept, 0, request, Room())
        assert not isinstance(accepted, RequestError), accepted
        for seq in accepted:
            self.scheduler.add(seq)
        return accepted

    def step(self) -> None:
        while len(self._in_flight) < 2 and (made := self._timed("schedule", self.scheduler.schedule)) is not None:
            self._in_flight.append(made[1])
        done = self._in_flight.popleft()
        samples = Samples.one_a_row(np.full(len(done.slots), 7, np.int32))
        out = self._timed("update", self.scheduler.update, done, samples, 0.0)
        self.seen.update(out.keys.tolist())


def measure(scenario: Scenario) -> dict[str, float]:
    """Worst and total milliseconds of each call, and the scenario's number of steps."""
    engine = Engine(scenario.num_blocks)
    for prompt, params in scenario.before:
        engine.add(prompt, params)
        while not engine.scheduler.is_idle:
            engine.step()
    for n in range(NUM_DECODE):
        engine.add(np.arange(10 + n, 100 + n, dtype=np.int32), SamplingParams(max_tokens=2 * MAX_STEPS, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.millis.clear()
    keep_pauses_short()  # as the daemon does before its loop
    last = [engine.add(prompt, params) for prompt, params in scenario.requests][-1][-1].key
    steps = 0
    while last not in engine.seen and steps < MAX_STEPS:
        engine.step()
        steps += 1
    gc.unfreeze()
    result: dict[str, float] = {"steps": steps}
    for name, millis in engine.millis.items():
        result |= {f"{name}_max_ms": round(max(millis), 2), f"{name}_sum_ms": round(sum(millis), 1)}
    return result


def measure_all() -> dict[str, dict[str, float]]:
    """Run every scenario and print a line for it."""
    names = ("accept", "schedule", "update")
    print(f"{'scenario':36}{'steps':>6}" + "".join(f"{name + ' max':>14}{'sum':>8}" for name in names) + "  (ms)")
    results = {}
    for title, scenario in scenarios():
        r = results[title] = measure(scenario)
        columns = "".join(f"{r[name + '_max_ms']:14.2f}{r[name + '_sum_ms']:8.1f}" for name in names)
        print(f"{title:36}{r['steps']:6}{columns}", flush=True)
    return results
