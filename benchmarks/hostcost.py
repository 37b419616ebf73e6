"""Host time of a decode step, no GPU needed: from "the GPU's result is visible" to "the next plan is published", and beyond.

The core side runs the real EngineCore, Scheduler, CoreToFrontends and rings. The worker is a fake that only writes the result
ring; the frontend is a fake process that sends the requests through ZeroMQ and reads the outputs. Two modes:

    inline (default)  core and fake worker take turns in one thread: the code's own cost, whatever else the machine does
    --processes       the fake worker is a process that spins on the plan ring and takes --step-ms a step, the core runs its own
                      loop: what a GPU would see, waits and wake-ups included. Needs 3 idle cores

    turn     the loop's other calls before it looks at the result (messages, deaths), inline only
    plan     result taken -> scheduler updated -> next step scheduled -> plan on the ring      <- the GPU may be waiting here
    publish  tokens encoded and given to ZeroMQ, filled blocks hashed; the workers run meanwhile
    visible  inline: turn + plan; --processes: result written -> the worker has the plan made from it. Target at 256 rows: 150

`--admission` measures arrivals: the worst schedule() when many requests arrive at once, in scenarios (hostcost_admission.py).
`--worker MODEL_DIR` times the other side on a GPU: ModelRunner.step of decode plans, graphs replayed. `--profile` prints a
profile. Bias: prompt lengths are staggered over a block, all rows decode, none arrives or finishes. Last line: `RESULT {json}`.
"""

import argparse
import contextlib
import cProfile
import json
import os
import platform
import pstats
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from hostcost_admission import measure_all
from load_stats import percentiles

from quire.enginecore.core import CoreConfig, EngineCore
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.silent_ranks import SilentRanks
from quire.enginecore.workers import RING_WORDS, WorkerGroup
from quire.ipc.config import EngineConfig
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.welcome import new_epoch
from quire.ipc.messages.frontend import PROTOCOL_VERSION, EngineLimits, Welcome
from quire.ipc.messages.workers import FullAttention
from quire.ipc.process.children import Child
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan_ring import PlanReader, PlanRing
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.samples import Samples
from quire.ipc.worker_config import WorkerConfig, resolved

ROWS = (1, 64, 256, 1024)
BLOCK_SIZE = 64
VOCAB_SIZE = 128256
PEERS = str(Path(__file__).with_name("hostcost_peers.py"))
clock = time.perf_counter_ns


@dataclass
class Times:
    """Microseconds of each stage, one entry a step."""

    stages: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **micros: float) -> None:
        for name, value in micros.items():
            self.stages.setdefault(name, []).append(value)

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: percentiles(values, digits=1) for name, values in self.stages.items()}


class FakeWorkers(WorkerGroup):
    """Rings and control link of one worker; its process idles, or runs what `command` returns for the rings' descriptors."""

    def __init__(self, template: WorkerConfig, command: Callable[[list[int], list[int]], list[str]] | None = None):
        super().__init__(template)
        self._command = command
        self.planned_at = 0

    def start(self) -> None:
        self.plan_ring = PlanRing.create(RING_WORDS, 1)
        self.result_ring = ResultRing.create(self.template.engine.max_num_seqs)
        self._link = CoreToWorkers(1)
        self._silent = SilentRanks(self.template.engine.collective_timeout_s, 1, self._ranks.where)
        plan_fds, result_fds = self.plan_ring.fds(0), self.result_ring.fds()
        idle = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        command = self._command(plan_fds, result_fds) if self._command else idle
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[*plan_fds, *result_fds]
        )
        mine, self._theirs = socket.socketpair()
        self._children = [Child(self.process, mine, os.eventfd(0))]
        self.is_ready = True
        self.reader = None if self._command else PlanReader.attach([os.dup(fd) for fd in plan_fds])

    def send_plan(self, words: np.ndarray) -> None:
        super().send_plan(words)
        self.planned_at = clock()

    def answer(self, step: ScheduledStep) -> None:
        """Play the worker: take all available plans, and write a step's results."""
        assert self.reader is not None
        while self.reader.read(0.0) is not None:
            pass
        self.result_ring.write(step.step, np.full(len(step.slots), 7, np.int32))


@contextlib.contextmanager
def engine(args: argparse.Namespace, rows: int, steps: int, command: Any = None) -> Iterator[tuple[EngineCore, FakeWorkers]]:
    """A core with `rows` requests on their way from a frontend; each lives for at least `steps` steps."""
    max_tokens = steps + 4096
    max_model_len = max_tokens + 4 * BLOCK_SIZE
    num_blocks = rows * (max_model_len // BLOCK_SIZE + 2) + 2
    flags = resolved(
        EngineConfig(load_format="dummy"),
        device="cpu",
        max_model_len=max_model_len,
        max_num_batched_tokens=8192,
        max_num_seqs=max(rows, args.max_num_seqs),
        block_size=BLOCK_SIZE,
    )
    worker = WorkerConfig(
        engine=flags, rank=0, generation=1, model_dir="", control_address="", plan_ring_fds=[], result_ring_fds=[]
    )
    scheduler = SchedulerConfig(
        max_num_seqs=flags.max_num_seqs, max_num_batched_tokens=8192, max_model_len=max_model_len, block_size=BLOCK_SIZE,
        num_blocks=num_blocks, kv_groups=(FullAttention(),), enable_prefix_caching=not args.no_prefix_caching,
        vocab_size=VOCAB_SIZE, eos_token_ids=(2,),
    )  # fmt: skip
    limits = EngineLimits(max_model_len, VOCAB_SIZE, flags.max_num_seqs, 20)
    config = CoreConfig(scheduler, limits, 8192, 0, 60.0, spins=True, log_requests=False, log_stats=False)
    workers = FakeWorkers(worker, command)
    epoch = new_epoch()
    welcome = Welcome(epoch, PROTOCOL_VERSION, ["m"], limits, [], [2], "0", 1, 60.0)
    core_link = CoreToFrontends(None, epoch=epoch, welcome=welcome, files={})
    workers.start()
    frontend = subprocess.Popen(
        [sys.executable, PEERS, "frontend", core_link.address, str(rows), str(max_tokens)], stdin=subprocess.PIPE
    )
    try:
        yield EngineCore(config, core_link, workers), workers
    finally:
        assert frontend.stdin is not None and workers.process.stdin is not None
        for process in (frontend, workers.process):
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(10)
        workers.kill()
        core_link.close()


def all_decode(core: EngineCore, rows: int) -> bool:
    return core.scheduler.num_decode_rows == rows and all(len(s.scheduled.prefills) == 0 for s in core._in_flight)


def turn(core: EngineCore) -> None:
    """The body of the core's loop, without its wait."""
    core._take_messages()
    core._watch_workers()
    core._fill()
    core._collect()
    core._heartbeat()


def warm_up(core: EngineCore, workers: FakeWorkers, rows: int, steps: int = 100) -> None:
    """Run until all rows decode and each has been sent something, then some more steps."""
    deadline = time.monotonic() + 60
    while not all_decode(core, rows):
        if core._in_flight:
            workers.answer(core._in_flight[0].scheduled)
        else:
            core._poll(0.01)
        turn(core)
        assert time.monotonic() < deadline, f"{rows} rows did not come to decode"
    for _ in range(steps):
        workers.answer(core._in_flight[0].scheduled)
        turn(core)


# ----------------------------------------------------------------------------------------------------------- the core side
def measure_inline(args: argparse.Namespace, rows: int) -> Times:
    """The calls of the core's loop one by one, in its own order."""
    times = Times()
    with engine(args, rows, args.steps) as (core, workers):
        warm_up(core, workers, rows)
        for _ in range(args.steps):
            workers.answer(core._in_flight[0].scheduled)
            t0 = clock()
            core._take_messages()
            core._watch_workers()
            core._fill()
            t1 = clock()
            done = core._collect()
            t2 = clock()
            core._heartbeat()
            assert done and t1 < workers.planned_at < t2
            plan, publish = (workers.planned_at - t1) / 1e3, (t2 - workers.planned_at) / 1e3
            times.add(turn=(t1 - t0) / 1e3, plan=plan, publish=publish, visible=(workers.planned_at - t0) / 1e3)
        assert all_decode(core, rows)
    return times


def profile(args: argparse.Namespace, rows: int) -> None:
    with engine(args, rows, args.steps) as (core, workers):
        warm_up(core, workers, rows)
        profiler = cProfile.Profile()
        for _ in range(args.steps):
            workers.answer(core._in_flight[0].scheduled)
            profiler.enable()
            turn(core)
            profiler.disable()
    print(
        f"\n{rows} rows, {args.steps} steps: per step, divide by {args.steps}; the profiler makes calls 2-3 times as expensive"
    )
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


def measure_processes(args: argparse.Namespace, rows: int) -> Times:
    """The core's own loop with a worker process: from a result's writing until the worker sees the plan made from it."""

    def command(plan_fds: list[int], result_fds: list[int]) -> list[str]:
        fds = json.dumps([plan_fds, result_fds])
        return [sys.executable, PEERS, "worker", fds, str(args.step_ms), str(args.steps)]

    times = Times()
    with engine(args, rows, args.steps, command) as (core, workers):
        lines: list[bytes] = []

        def watch() -> None:
            assert workers.process.stdout is not None
            lines.append(workers.process.stdout.readline())
            core.stop(0.0)

        workers.process.stdin.write(f"{rows}\n".encode())  # type: ignore[union-attr]
        workers.process.stdin.flush()  # type: ignore[union-attr]
        threading.Thread(target=watch, daemon=True).start()
        core.run()
        for micros in json.loads(lines[0]):
            times.add(visible=micros)
    return times


# --------------------------------------------------------------------------------------------------------- the worker side
def measure_worker(model_dir: str, sizes: list[int], steps: int, device: str = "cuda") -> Iterator[tuple[int, Times]]:
    """Time inside ModelRunner.step for plans of so many decode rows; on a GPU graphs are replayed without waiting."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from inline_engine import InlineEngine

    gpu = device == "cuda"
    steps = min(steps, 200)  # the KV cache holds all rows to their end: some 80 GB for 1024 rows of an 8B model
    block_size, length, rows = (BLOCK_SIZE if gpu else 16), 2 * BLOCK_SIZE + steps, max(sizes)
    inline = InlineEngine(
        model_dir, device=device, dtype=torch.bfloat16 if gpu else torch.float32, dummy=True, graphs=gpu, max_num_seqs=rows,
        budget=8192, block_size=block_size, max_model_len=length + 1, enable_prefix_caching=False,
        num_blocks=rows * (length // block_size + 2) + 2,
    )  # fmt: skip
    rng, vocab = np.random.default_rng(0), inline.scheduler.config.vocab_size
    for size in sizes:
        for _ in range(size):
            prompt = rng.integers(10, min(30000, vocab), int(rng.integers(1, 2 * BLOCK_SIZE)))
            inline.add(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))
        times, in_flight = Times(), deque[ScheduledStep]()
        with inline.runner.device.stream(), torch.inference_mode():
            while True:
                while len(in_flight) < 2 and (made := inline.scheduler.schedule()) is not None:
                    words = made[0].encode()
                    begin = clock()
                    inline.runner.step(words, lambda: np.zeros(0, np.int32))
                    if len(made[0].decode_rows) == size and not len(made[0].prefill_rows):
                        times.add(step=(clock() - begin) / 1e3)
                    in_flight.append(made[1])
                if not in_flight:
                    break
                if gpu:
                    torch.cuda.synchronize()
                done = in_flight.popleft()
                inline.scheduler.update(done, Samples.one_a_row(np.full(len(done.slots), 7, np.int32)), now=0.0)
        yield size, times
    inline.runner.device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--processes", action="store_true", help="a worker process and the core's own loop")
    parser.add_argument("--step-ms", type=float, default=4.0, help="a step's time on the pretended GPU (default: %(default)s)")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--admission", action="store_true", help="the scheduler alone, when many requests arrive at once")
    parser.add_argument("--worker", metavar="MODEL_DIR", help="the worker side: needs a GPU (or --device cpu, without graphs)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    result: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "steps": args.steps}
    if args.admission:
        print("RESULT " + json.dumps(result | {"admission": measure_all()}))
        return
    print(f"{'rows':>6} {'stage':10}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")) + "  (us)")
    if args.processes and len(os.sched_getaffinity(0)) < 4:
        print("beware: core, worker and frontend spin on fewer than 4 cores; these figures are the scheduler's, not ours")
    if args.profile:
        for rows in args.rows:
            profile(args, rows)
        return
    if args.worker:
        found = measure_worker(args.worker, args.rows, args.steps, args.device)
    else:
        core = measure_processes if args.processes else measure_inline
        found = ((rows, core(args, rows)) for rows in args.rows)
    for rows, times in found:
        result[str(rows)] = times.summary()
        for stage, points in result[str(rows)].items():
            print(f"{rows:6} {stage:10}" + "".join(f"{value:10.1f}" for value in points.values()), flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
