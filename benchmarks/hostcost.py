"""Host time of a decode step, no GPU needed: from "the GPU's result is visible" to "the next plan is published", and beyond.

The core side runs the real EngineCore, Scheduler, CoreEndpoint and rings. The worker is faked: it writes the result ring and
nothing else; so is the frontend, a process of its own that sends the requests through ZeroMQ and reads what comes. Two ways:

    inline (default)  core and fake worker take turns in one thread: the code's own cost, whatever else the machine does
    --processes       the fake worker is a process that spins on the plan ring and takes --step-ms a step, the core runs its own
                      loop: what a GPU would see, waiting and waking included. Needs 3 idle cores

    turn     the loop's other calls before it looks at the result (messages, deaths), inline only
    plan     result taken -> scheduler updated -> next step scheduled -> plan on the ring      <- the GPU may be waiting here
    publish  tokens encoded and given to ZeroMQ, filled blocks hashed; the workers run meanwhile
    visible  inline: turn + plan; --processes: result written -> the worker has the plan made from it. Target at 256 rows: 150

`--worker MODEL_DIR` times the other side on a GPU: ModelRunner.step of decode plans, graphs replayed. `--profile` prints what
costs. Bias: prompt lengths are staggered over a block, all rows decode, nobody comes or goes. Last line: `RESULT {json}`.
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

import msgspec
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from load_stats import percentiles

from quire.enginecore.core import CoreConfig, EngineCore
from quire.enginecore.scheduler import ScheduledStep, SchedulerConfig
from quire.enginecore.workers import RING_WORDS, WorkerGroup
from quire.ipc.config import WorkerConfig
from quire.ipc.core_endpoint import CoreEndpoint, new_epoch
from quire.ipc.messages import (
    IDENTITY_BYTES,
    PROTOCOL_VERSION,
    AddRequest,
    CoreMessage,
    EngineLimits,
    Hello,
    Ping,
    Welcome,
)
from quire.ipc.plan import H_NUM_DECODE_ROWS, H_NUM_PREFILL_ROWS
from quire.ipc.process import Child
from quire.ipc.result_ring import ResultRing
from quire.ipc.ring import PlanReader, PlanRing
from quire.ipc.sampling import SamplingParams
from quire.ipc.worker_channel import WorkerEndpoint

ROWS = (1, 64, 256, 1024)
BLOCK_SIZE = 64
VOCAB_SIZE = 128256
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
    """Rings and control link of one worker; its process does nothing, or what `command` says with the rings' descriptors."""

    def __init__(self, template: WorkerConfig, command: Callable[[list[int], list[int]], list[str]] | None = None):
        super().__init__(template)
        self._command = command
        self.planned_at = 0

    def start(self) -> None:
        self.plan_ring = PlanRing.create(RING_WORDS, 1)
        self.result_ring = ResultRing.create(self.template.max_num_seqs)
        self._endpoint = WorkerEndpoint(1)
        plan_fds, result_fds = self.plan_ring.fds(0), self.result_ring.fds()
        idle = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        command = self._command(plan_fds, result_fds) if self._command else idle
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[*plan_fds, *result_fds]
        )
        mine, self._theirs = socket.socketpair()
        self._children = [Child(self.process, mine)]
        self.is_ready = True
        self.reader = None if self._command else PlanReader.attach([os.dup(fd) for fd in plan_fds])

    def send_plan(self, words: np.ndarray) -> None:
        super().send_plan(words)
        self.planned_at = clock()

    def answer(self, step: ScheduledStep) -> None:
        """Play the worker: take what plans there are, write a step's results."""
        assert self.reader is not None
        while self.reader.read(0.0) is not None:
            pass
        self.result_ring.write(step.step, np.full(len(step.slots), 7, np.int32))


@contextlib.contextmanager
def engine(args: argparse.Namespace, rows: int, steps: int, command: Any = None) -> Iterator[tuple[EngineCore, FakeWorkers]]:
    """A core whose `rows` requests are on their way from a frontend; each lives for `steps` steps at least."""
    max_tokens = steps + 4096
    max_model_len = max_tokens + 4 * BLOCK_SIZE
    num_blocks = rows * (max_model_len // BLOCK_SIZE + 2) + 2
    worker = WorkerConfig(
        rank=0, world_size=1, epoch=1, model_dir="", control_address="", plan_ring_fds=[], result_ring_fds=[], output_rank=0,
        device="cpu", dtype="auto", load_format="dummy", max_model_len=max_model_len, max_num_seqs=max(rows, args.max_num_seqs),
        max_num_batched_tokens=8192, block_size=BLOCK_SIZE, gpu_memory_utilization=0.9, cpu_kv_cache_gib=1.0,
        num_gpu_blocks_override=None, enforce_eager=False, max_logprobs=20, seed=0,
    )  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_seqs=worker.max_num_seqs, max_num_batched_tokens=8192, max_model_len=max_model_len, block_size=BLOCK_SIZE,
        num_blocks=num_blocks, windows=(0,), enable_prefix_caching=not args.no_prefix_caching, vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
    )  # fmt: skip
    limits = EngineLimits(max_model_len, VOCAB_SIZE, worker.max_num_seqs, 20, num_blocks * BLOCK_SIZE)
    config = CoreConfig(scheduler, limits, 8192, 0, 60.0, spins=True, log_requests=False, log_stats=False)
    workers = FakeWorkers(worker, command)
    epoch = new_epoch()
    welcome = Welcome(epoch, PROTOCOL_VERSION, ["m"], limits, [], [2], "0", 1, 60.0, True)
    endpoint = CoreEndpoint(None, epoch=epoch, welcome=welcome, files={})
    workers.start()
    frontend = subprocess.Popen(
        [sys.executable, __file__, "--child-frontend", endpoint.address, str(rows), str(max_tokens)], stdin=subprocess.PIPE
    )
    try:
        yield EngineCore(config, endpoint, workers), workers
    finally:
        assert frontend.stdin is not None and workers.process.stdin is not None
        for process in (frontend, workers.process):
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(10)
        workers.kill()
        endpoint.close()


def all_decode(core: EngineCore, rows: int) -> bool:
    return len(core.scheduler._decode) == rows and all(len(s.scheduled.prefills) == 0 for s in core._in_flight)


def turn(core: EngineCore) -> None:
    """The loop's body, without its wait."""
    core._take_messages()
    core._watch_workers()
    core._fill()
    core._collect()
    core._beat()


def warm_up(core: EngineCore, workers: FakeWorkers, rows: int, steps: int = 100) -> None:
    """Until all rows decode and each has been sent something; then some steps more."""
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
            core._beat()
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
    """The core's own loop against a worker process: result written -> plan made from it seen by the worker."""

    def command(plan_fds: list[int], result_fds: list[int]) -> list[str]:
        fds = json.dumps([plan_fds, result_fds])
        return [sys.executable, __file__, "--child-worker", fds, str(args.step_ms), str(args.steps)]

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


def child_worker(fds: str, step_ms: float, steps: int) -> None:
    """A GPU's clock: steps run one after the other, `step_ms` each; at the end of one its result is written. Reports, for each
    steady step, the time from there to the arrival of the plan made from it: the second after it, for two are in flight."""
    plan_fds, result_fds = json.loads(fds)
    reader, ring = PlanReader.attach(plan_fds), ResultRing.attach(result_fds)
    rows = int(sys.stdin.readline())
    running: deque[tuple[int, int, int]] = deque()  # step, rows, when it ends
    written: dict[int, int] = {}
    waits: list[float] = []
    ends = 0
    while len(waits) < steps + 200:
        record, now = reader.read(0.0), clock()
        if record is not None:
            words = record[1]
            step, decode_rows = int(words[0]), int(words[H_NUM_DECODE_ROWS])
            ends = max(now, ends) + int(step_ms * 1e6)
            running.append((step, decode_rows + int(words[H_NUM_PREFILL_ROWS]), ends))
            if step - 2 in written and decode_rows == rows:
                waits.append((now - written[step - 2]) / 1e3)
        if running and now >= running[0][2]:
            step, count, _ = running.popleft()
            ring.write(step, np.full(count, 7, np.int32))
            written[step] = clock()
    print(json.dumps(waits[200:]), flush=True)
    sys.stdin.read()


def child_frontend(address: str, rows: int, max_tokens: int) -> None:
    """Send the requests, read and drop what comes, until the core's process closes our standard input."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.ROUTING_ID, b"\1" + os.urandom(IDENTITY_BYTES - 1))
    dealer.set(zmq.LINGER, 0)
    dealer.connect(address)
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(CoreMessage).decode
    dealer.send(encode(Hello(PROTOCOL_VERSION)))
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    epoch, pinged = 0, time.monotonic()
    while True:
        ready = dict(poller.poll(1000))
        if sys.stdin.fileno() in ready:
            break
        if dealer in ready:
            data = dealer.recv()
            if not epoch:
                epoch = decode(data).epoch
                for i in range(rows):
                    prompt = rng.integers(10, 30000, int(rng.integers(1, 2 * BLOCK_SIZE)), np.int32)
                    dealer.send(encode(AddRequest(epoch, i, prompt.tobytes(), params)))
        if time.monotonic() > pinged + 1:
            dealer.send(encode(Ping(epoch)))
            pinged = time.monotonic()
    dealer.close()
    context.term()


# --------------------------------------------------------------------------------------------------------- the worker side
def measure_worker(model_dir: str, rows: int, steps: int, device: str = "cuda") -> Times:
    """Time inside ModelRunner.step for plans of `rows` decode rows; on a GPU graphs are replayed and nothing waits for it."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from inline_engine import InlineEngine

    gpu = device == "cuda"
    length = 3 * BLOCK_SIZE + steps
    inline = InlineEngine(
        model_dir, device=device, dtype=torch.bfloat16 if gpu else torch.float32, dummy=True, graphs=gpu, max_num_seqs=rows,
        budget=8192, block_size=BLOCK_SIZE if gpu else 16, max_model_len=length + 1, enable_prefix_caching=False,
        num_blocks=rows * (length // 16 + 2) + 2,
    )  # fmt: skip
    rng, vocab = np.random.default_rng(0), inline.scheduler.config.vocab_size
    for _ in range(rows):
        prompt = rng.integers(10, min(30000, vocab), int(rng.integers(1, 2 * BLOCK_SIZE)))
        inline.add(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))
    times, in_flight = Times(), deque[ScheduledStep]()
    with inline.runner.device.stream(), torch.inference_mode():
        while True:
            while len(in_flight) < 2 and (made := inline.scheduler.schedule()) is not None:
                plan, step = made
                words = plan.encode()
                begin = clock()
                inline.runner.step(words, lambda: np.zeros(0, np.int32))
                if len(plan.decode_rows) == rows and not len(plan.prefill_rows):
                    times.add(step=(clock() - begin) / 1e3)
                in_flight.append(step)
            if not in_flight:
                return times
            if gpu:
                torch.cuda.synchronize()
            done = in_flight.popleft()
            inline.scheduler.update(done, np.full(len(done.slots), 7, np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--processes", action="store_true", help="a worker process and the core's own loop")
    parser.add_argument("--step-ms", type=float, default=4.0, help="a step's time on the pretended GPU (default: %(default)s)")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--worker", metavar="MODEL_DIR", help="the worker side: needs a GPU (or --device cpu, without graphs)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    result: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "steps": args.steps}
    print(f"{'rows':>6} {'stage':10}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")) + "  (us)")
    for rows in args.rows:
        if args.profile:
            profile(args, rows)
            continue
        if args.worker:
            times = measure_worker(args.worker, rows, args.steps, args.device)
        else:
            times = (measure_processes if args.processes else measure_inline)(args, rows)
        result[str(rows)] = times.summary()
        for stage, found in result[str(rows)].items():
            print(f"{rows:6} {stage:10}" + "".join(f"{value:10.1f}" for value in found.values()), flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--child-worker", fds, step_ms, steps]:
            child_worker(fds, float(step_ms), int(steps))
        case ["--child-frontend", address, rows, max_tokens]:
            child_frontend(address, int(rows), int(max_tokens))
        case _:
            main()
