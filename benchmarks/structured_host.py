"""Host time of a step with grammar masks, no GPU needed: from "the tokens are in" to "the masks are staged".

`structured_host.py MODEL_DIR [--rows 64] [--steps 128]`: the folder needs only config.json and tokenizer.json. The real
EngineCore, GrammarCompiler, rings and mask threads run in this process, with the schemas of structured.py, all compiled before;
the worker is a function here that picks random tokens by the masks. Stages of a step, in order, in us:

    tokens   read and checked             submit    just before masks are requested    begin    their thread has started
    consume  matchers have advanced       fill      llguidance's last masks are made   finish   completed, the waiter woken
    sent     all masks are on the ring    plan      the next plan is, too              publish  tokens are on their way to users
    path     from the first to `sent`: the forward pass may hide this, together with `last`
    update   from the first until the scheduler has the tokens, while matchers advance
    staged   a worker reads, checks and copies the records (the copy to the device is one in memory here)
    last     the part of `staged` for the last record; the others are handled while masks are made

The times of the network and the GPU are not included. The last line is `RESULT {json}`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from core_by_hand import FakeWorkers, decode, worker_template
from ipc_cores import RawFrontend
from structured import TITLES, schema

from quire.enginecore.core import CoreConfig, EngineCore
from quire.enginecore.daemon import SWITCH_S
from quire.enginecore.garbage import keep_pauses_short
from quire.enginecore.grammar import mask_threads as module
from quire.enginecore.grammar import masks as masks_module
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.grammar.mask_threads import mask_threads
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.workers import AREA_WORDS, RING_WORDS
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineLimits,
    Generate,
    Heartbeat,
    Hello,
    StepOutputs,
    TokenInputs,
    Welcome,
)
from quire.ipc.messages.workers import FullAttention
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.masks import RowsAndMasks
from quire.ipc.step.plan import StepPlan, decode_plan
from quire.ipc.step.plan_ring import KIND_PLAN, PlanReader, PlanRing
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.structured_outputs import StructuredOutputs
from quire.workers.devices.masks import CudaMasks, PinnedRing
from quire.workers.outputs.tokens import NO_ROWS
from quire.workers.records import Records

clock = time.perf_counter_ns
EPOCH, BLOCK_SIZE = 77, 64


class Event:
    """The event of a copy that is done at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Workers(FakeWorkers):
    """One simulated worker: `answer` runs the oldest plan, after loading all of its masks."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        super().__init__(worker_template())
        self.rows, self.vocab_size = rows, vocab_size
        self.staged: list[float] = []
        self.last: list[float] = []
        self._random = np.random.default_rng(0)

    def start(self) -> None:
        self.generation += 1
        self.plan_ring, self.result_ring = (
            PlanRing.create(RING_WORDS, 1, AREA_WORDS),
            ResultRing.create(self.rows),
        )
        self._link = CoreToWorkers(self.generation)
        self._reader = PlanReader.attach([os.dup(fd) for fd in self.plan_ring.fds(0)])
        self._records = Records(self._reader)
        self.masks = CudaMasks(self.rows, self.vocab_size, torch.device("cpu"))
        self.masks._ring = PinnedRing(self._reader, Event)  # type: ignore[arg-type]
        self._rows = np.zeros(0, np.int32)
        self._plan: StepPlan | None = None
        self.is_ready = True

    def answer(self) -> None:
        plan = self._plan or self._next_plan()
        assert plan is not None
        if plan.has_mask_rows:
            begin = clock()
            without = self._load(plan)
            end = clock()
            assert not len(without), "a mask came seconds late: this machine has too much else to do"
            self.staged.append((end - begin) / 1e3)
            self.last.append((end - self._reads[-2]) / 1e3)  # the last read finds no more
        self.result_ring.write(plan.step, self._sample(plan.num_rows))
        self._plan = self._next_plan()

    def _next_plan(self) -> StepPlan | None:
        """Read the next plan as a worker does that waits for masks: it releases all records before them."""
        record = self._records.read(0.0, 0.0)
        while record is not None and record[0] != KIND_PLAN:  # a control request
            record = self._records.read(0.0, 0.0)
        if record is None:
            return None
        plan = decode_plan(record[1].copy(), self._rows)
        self._rows = plan.decode_rows
        if self._reader.arm():
            self._reader.disarm()
        return plan

    def _load(self, plan: StepPlan) -> np.ndarray:
        """Like ModelRunner.load_masks."""
        expected = plan.mask_rows.copy()
        loaded = self.masks.load(expected, self._timed(self._records.masks(plan)))
        return NO_ROWS if len(loaded) == len(expected) else np.setdiff1d(expected, loaded)

    def _timed(self, records: Iterator[RowsAndMasks]) -> Iterator[RowsAndMasks]:
        self._reads = [clock()]
        for record in records:
            yield record
            self._reads.append(clock())

    def _sample(self, rows: int) -> np.ndarray:
        """A random token of each row's mask, without reading the whole mask, which would flush the CPU's caches."""
        return np.asarray([self._pick(mask) for mask in self.masks.tensor[:rows].numpy().view(np.uint32)], np.int32)

    def _pick(self, mask: np.ndarray) -> int:
        for at in self._random.integers(0, self.vocab_size, 20).tolist():
            if mask[at >> 5] >> (at & 31) & 1:
                return at
        word = int(self._random.choice(mask.nonzero()[0]))
        return 32 * word + int(self._random.choice([bit for bit in range(32) if mask[word] >> bit & 1]))


class TwoPools:
    """Like llguidance.LLExecutor, but other threads advance matchers than make masks."""

    def __init__(self, num_threads: int, num_to_consume: int, executor: Any = llguidance.LLExecutor) -> None:
        few = executor(num_to_consume) if num_to_consume else None
        self.consume_token_par = few.consume_token_par if few else lambda pairs: [m.consume_token(t) for m, t in pairs]
        self.unsafe_compute_mask_ptr = executor(num_threads).unsafe_compute_mask_ptr


class Marks:
    """When a step's calls were made or returned, in nanoseconds."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self._wrapped: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, method: str, after: str = "", before: str = "") -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.at[before] = clock()
            result = call(*args, **kwargs)
            if after:
                self.at[after] = clock()
            return result

        self._wrapped.append((owner, method, call))
        setattr(owner, method, marked)

    def unwrap(self) -> None:
        for owner, method, call in self._wrapped:
            setattr(owner, method, call)


class Core:
    def __init__(self, args: argparse.Namespace) -> None:
        folder = Path(args.model)
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        rows, length = args.rows, args.steps + 512
        blocks = rows * (length // BLOCK_SIZE + 2) + 2
        scheduler = SchedulerConfig(rows, 8192, length, BLOCK_SIZE, blocks, (FullAttention(),), vocab_size=vocab)
        limits = EngineLimits(length, vocab, rows, 20)
        config = CoreConfig(scheduler, limits, 1000, 0, 60.0, spins=True, log_requests=False, log_stats=False)
        welcome = Welcome(EPOCH, PROTOCOL_VERSION, ["m"], limits, [], [0], "0", 1, 60.0)
        self.link = CoreToFrontends(None, epoch=EPOCH, welcome=welcome)
        self.workers = Workers(rows, vocab)
        self.workers.start()
        num_threads = args.threads or mask_threads(len(os.sched_getaffinity(0)))
        self.grammars = GrammarCompiler((folder / "tokenizer.json").read_bytes(), vocab, (), num_threads)
        self.core = EngineCore(config, self.link, self.workers, grammars=self.grammars)
        self.frontend = RawFrontend(self.link.address)
        self.frontend.send(Hello(PROTOCOL_VERSION))
        random = np.random.default_rng(1)
        while not self.frontend.ready():
            self.core._take_messages()
        self.frontend.socket.recv()
        self._rows, self._vocab, self._random = rows, vocab, random
        self._schemas = [json.dumps(schema(0 if args.same_schema else i, args.titles)) for i in range(rows)]
        self._max_tokens = args.steps
        self._num_requests = 0

    def submit(self) -> None:
        for text in self._schemas:
            params = SamplingParams(
                max_tokens=self._max_tokens, ignore_eos=True, structured_outputs=StructuredOutputs("json", text)
            )
            prompt = self._random.integers(10, self._vocab, 32).astype(np.int32)
            self._num_requests += 1
            self.frontend.send(AddRequest(EPOCH, self._num_requests, TokenInputs(prompt.tobytes()), Generate(params)))
        while len(self.core.scheduler.waiting) < self._rows:
            self.core._take_messages()

    def all_decode(self) -> bool:
        in_flight = self.core._in_flight
        return bool(in_flight) and all(len(s.scheduled.slots) == self._rows and not s.scheduled.prefills for s in in_flight)

    def step(self) -> int:
        """Let the worker run a step, and the core take its results; returns when they arrived."""
        core = self.core
        self._turn_until(self._is_sent)
        self.workers.answer()
        until = clock() + 1_000_000  # as long as a forward pass, so that threads have gone to sleep
        while clock() < until:
            pass
        begin, num_steps = clock(), core.scheduler.oldest_step
        self._turn_until(lambda: core.scheduler.oldest_step > num_steps)
        self._turn_until(lambda: not core.scheduler.has_requests or self._is_sent())
        while self.frontend.ready():
            message = decode(self.frontend.socket.recv())
            assert isinstance(message, StepOutputs | Heartbeat), message
        return begin

    def _is_sent(self) -> bool:
        """Whether the workers have everything for a step."""
        in_flight = self.core._in_flight
        return bool(in_flight) and not self.core._masks.due(in_flight[0].scheduled.step)

    def _turn_until(self, condition: Callable[[], bool]) -> None:
        """Run turns of the core's loop, from the point where it waits."""
        while not condition():
            if not self.core._collect():
                self.core._poll(0.0)
            self.core._heartbeat()
            self.core._take_messages()
            self.core._watch_workers()
            self.core._fill()

    def close(self) -> None:
        self.grammars.close()
        self.frontend.close()
        self.core.close()
        self.workers.kill()
        self.link.close(linger_s=0)


ORDER = ("tokens", "submit", "begin", "consume", "fill", "finish", "sent", "plan", "publish")


def mark_stages(core: EngineCore, marks: Marks) -> None:
    threads = core._grammar._threads
    assert threads is not None
    marks.wrap(core, "_tokens", after="tokens")
    marks.wrap(core.scheduler, "update", after="update")
    marks.wrap(threads, "submit", before="submit")
    marks.wrap(module._Maker, "_do_plain", before="begin")
    marks.wrap(module._Maker, "_consume", after="consume")
    marks.wrap(module, "fill_next_token_bitmask_par", after="fill")
    marks.wrap(core._grammar, "_send", before="finish")
    marks.wrap(core.workers, "send_masks", after="sent")
    marks.wrap(core.workers, "send_plan", after="plan")
    marks.wrap(core, "_publish", after="publish")


@contextmanager
def patience() -> Iterator[None]:
    """Let no mask count as late, and no grammar as slow, because other processes use this machine."""
    slow_s, late_s, timeout_s = module.SLOW_S, masks_module.MASKS_LATE_S, masks_module.MASK_TIMEOUT_S
    module.SLOW_S, masks_module.MASKS_LATE_S, masks_module.MASK_TIMEOUT_S = 2.0, 20.0, 20.0
    try:
        yield
    finally:
        module.SLOW_S, masks_module.MASKS_LATE_S, masks_module.MASK_TIMEOUT_S = slow_s, late_s, timeout_s


@patience()
def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    engine, marks = Core(args), Marks()
    found: dict[str, list[float]] = {name: [] for name in (*ORDER, "path", "update")}
    keep_pauses_short()
    sys.setswitchinterval(SWITCH_S)
    try:
        for is_measured in [False] * args.warm_up + [True]:
            engine.submit()
            while not engine.all_decode():
                engine.step()
            if is_measured:
                mark_stages(engine.core, marks)
                engine.workers.staged.clear()
                engine.workers.last.clear()
            while engine.all_decode():
                begin = engine.step()
                # a busy machine may leave a step without one of the stages
                if is_measured and engine.all_decode() and all(marks.at.get(name, 0) >= begin for name in ORDER):
                    add_stages(found, marks.at, begin)
            while engine.core._in_flight or engine.core.scheduler.has_requests:
                engine.step()
    finally:
        marks.unwrap()
        engine.close()
    return found | {"staged": engine.workers.staged[1:], "last": engine.workers.last[1:]}


def add_stages(found: dict[str, list[float]], at: dict[str, int], begin: int) -> None:
    for name, end in (("path", "sent"), ("update", "update")):
        found[name].append((at[end] - begin) / 1e3)
    for name in ORDER:
        found[name].append((at[name] - begin) / 1e3)
        begin = at[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="of llguidance; 0: as the engine would have here")
    parser.add_argument("--consume-threads", type=int, help="others, so many, roll matchers on; 0: the thread that asks")
    parser.add_argument("--parts", type=int, default=module.PARTS, help="in which masks are made")
    parser.add_argument("--same-schema", action="store_true")
    parser.add_argument("--titles", default="alike", choices=TITLES, help="how long the strings of the schemas may be")
    parser.add_argument("--warm-up", type=int, default=2, help="outputs of each schema before those that count")
    args = parser.parse_args()
    module.PARTS = args.parts
    if args.consume_threads is not None:
        module.llguidance.LLExecutor = lambda num_threads: TwoPools(num_threads, args.consume_threads)  # type: ignore[misc]
    result: dict[str, Any] = {"rows": args.rows, "steps": args.steps, "cpus": os.cpu_count()}
    print(f"{'stage':10}" + "".join(f"{name:>10}" for name in ("mean", "p10", "p50", "p90", "p99")) + "  (us)")
    for stage, micros in measure(args).items():
        points = {f"p{n}": float(np.percentile(micros, n)) for n in (10, 50, 90, 99)}
        result[stage] = {name: round(value, 1) for name, value in ({"mean": float(np.mean(micros))} | points).items()}
        print(f"{stage:10}" + "".join(f"{value:10.1f}" for value in result[stage].values()))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
