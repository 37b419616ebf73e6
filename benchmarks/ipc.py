"""The cost of the links between processes: round trips, throughput, and the calls of each step.

    python benchmarks/ipc.py [--rounds N]

Method: whole processes, started as the engine starts them; each figure is of `--rounds` repetitions after a tenth of them as
warm-up, by the wall clock around the call or the round trip. A link's far end answers from Python, so its costs are in the
round trip. "At full speed" is asked for WINDOWS times, after one as warm-up, and timed from the question to the last message:
percentiles are of these windows' means. Biased against us if a machine has fewer free cores than a link has spinning processes:
cores are printed, and such rows are marked. This table has no peer: its purpose is to show what a step spends outside the GPU.
"""

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import uvloop
import zmq

from quire.ipc.links.core_and_workers import CoreToWorkers, WorkerToCore
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.curve import CoreKeys, FrontendKeys, make_keys
from quire.ipc.links.frontend_to_core import FrontendToCore
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    AddRequest,
    CoreMessage,
    EngineLimits,
    FrontendMessage,
    Generate,
    Heartbeat,
    StepOutputs,
    TokenInputs,
    Welcome,
)
from quire.ipc.messages.workers import AllocateKV, PromptLogprobsOfRow, SideResults, WorkerReady
from quire.ipc.process.children import Child, child_main_config, spawn, tell_parent
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan import DTYPES, StepPlan, decode_plan, default_slots
from quire.ipc.step.plan_ring import KIND_PLAN, KIND_SHUTDOWN, PlanReader, PlanRing
from quire.ipc.step.result_ring import ResultRing, RowLogprobs

ROWS = 256  # of a step
STREAM = 64  # tokens in one StepOutputs
WINDOWS = 20  # of a throughput measurement
POSITIONS, NUM_TOP = 512, 20  # of one message with prompt logprobs
MODULE = Path(__file__).stem
ECHO, FLOOD = 1, 2  # request ids, to the core of measure_zmq
NO_ROWS = np.zeros(0, np.int32)


class Role(msgspec.Struct, kw_only=True):
    name: str
    ring_fds: list[int] = []
    result_fds: list[int] = []
    address: str = ""
    spin_s: float = 0.0
    rounds: int = 0
    keys: FrontendKeys | None = None


# ------------------------------------------------------------------------------------------------- the far ends
def worker(role: Role) -> None:
    """Reads plans; the worker with the result ring answers each with ROWS tokens."""
    reader = PlanReader.attach(role.ring_fds)
    results = ResultRing.attach(role.result_fds) if role.result_fds else None
    tokens = np.arange(ROWS, dtype=np.int32)
    while (record := reader.read(60.0, role.spin_s)) is not None and record[0] != KIND_SHUTDOWN:
        if results is not None:
            results.write(int(record[1][0]), tokens)


def frontend(role: Role) -> None:
    """Sends a request and waits for its token, `rounds` times; then asks for as many messages at once, WINDOWS + 1 times."""
    uvloop.run(_frontend(role))


async def _frontend(role: Role) -> None:
    arrived = asyncio.Event()
    num_tokens = num_messages = 0

    def on_message(message: CoreMessage) -> None:
        nonlocal num_tokens, num_messages
        if isinstance(message, StepOutputs):
            num_tokens += len(message.tokens) // 4
            num_messages += 1
            arrived.set()

    async def receive(expected: int) -> None:
        nonlocal num_tokens
        while num_tokens < expected:
            arrived.clear()
            await arrived.wait()
        num_tokens -= expected

    link = await FrontendToCore.connect(role.address, on_message=on_message, keys=role.keys)
    request = AddRequest(link.epoch, ECHO, TokenInputs(bytes(4 * 1000)), Generate(SamplingParams()))
    times = []
    for _ in range(role.rounds):
        started = time.perf_counter()
        link.send(request)
        await receive(1)
        times.append(time.perf_counter() - started)
    per_step = []
    for window in range(WINDOWS + 1):
        if window == 1:
            num_messages = 0
        started = time.perf_counter()
        link.send(AddRequest(link.epoch, FLOOD, TokenInputs(bytes(4)), Generate(SamplingParams())))
        await receive(STREAM * role.rounds)
        per_step.append((time.perf_counter() - started) / role.rounds)
    report = {"times": times, "per_step": per_step[1:], "merged": WINDOWS * role.rounds / max(1, num_messages)}
    tell_parent({"report": msgspec.json.encode(report).decode()})
    await link.close()


def control(role: Role) -> None:
    """A worker on its control link: AllocateKV(n) is answered by WorkerReady if n is 1, else by n prompt logprobs; 0 ends."""
    link = WorkerToCore(role.address, rank=0, generation=1)
    ready, column = WorkerReady(0), bytes(4 * POSITIONS)
    large = SideResults(0, 1, [PromptLogprobsOfRow(0, column, column, column * NUM_TOP, column * NUM_TOP)])
    link.send(ready)
    while (command := link.receive(60.0)) is not None and command.num_blocks > 0:
        for _ in range(command.num_blocks):
            link.send(ready if command.num_blocks == 1 else large)
    link.close()


ROLES: dict[str, Callable[[Role], None]] = {"worker": worker, "frontend": frontend, "control": control}


def child_main() -> None:
    role = child_main_config(Role)
    ROLES[role.name](role)


# ------------------------------------------------------------------------------------------------- measuring
class Table:
    """Rows of (what, p50 us, p99 us, per second)."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        print(f"{'':58} {'p50 us':>9} {'p99 us':>9} {'a second':>11}")

    def add(self, name: str, seconds: list[float] | np.ndarray, batch: int = 1, note: str = "") -> None:
        us = np.asarray(seconds) * 1e6 / batch
        p50, p99 = (float(x) for x in np.percentile(us, [50, 99]))
        self.rows[name] = {"p50_us": round(p50, 3), "p99_us": round(p99, 3), "per_s": round(1e6 / float(us.mean()))}
        print(f"{name:58} {p50:9.2f} {p99:9.2f} {1e6 / us.mean():11,.0f} {note}", flush=True)


def timed(call: Callable[[], object], rounds: int, batch: int = 10) -> np.ndarray:
    """Seconds of one call, measured in batches, so that the clock's own 0.1 us does not count."""
    times = np.empty(max(1, rounds // batch))
    for i in range(-len(times) // 10, len(times)):
        started = time.perf_counter()
        for _ in range(batch):
            call()
        times[i] = time.perf_counter() - started
    return times / batch


def example_plan(decode: int, prefill_tokens: int = 0, same: bool = False) -> StepPlan:
    """A step of `decode` rows, one in 16 of which gets a new block, and perhaps a chunk of one prompt."""
    rows = 1 if prefill_tokens else 0
    sections = {
        "slot_updates": default_slots(rows),
        "block_updates": np.zeros(decode // 16 + prefill_tokens // 16, DTYPES["block_updates"]),
        "decode_rows": np.arange(decode, dtype=np.int32),
        "prefill_rows": np.zeros(rows, DTYPES["prefill_rows"]),
        "prefill_tokens": np.zeros(prefill_tokens, np.int32),
    }
    return StepPlan(1, {name: rows for name, rows in sections.items() if len(rows)}, same_decode_rows=same)


def outputs(num_tokens: int) -> StepOutputs:
    keys = (np.arange(num_tokens, dtype=np.int64) << 8).tobytes()
    return StepOutputs(1, 0, keys, np.arange(num_tokens, dtype=np.int32).tobytes())


def measure_codecs(table: Table, rounds: int) -> None:
    encoder = msgspec.msgpack.Encoder()
    messages = [
        (
            "AddRequest, 1000 tokens",
            AddRequest(1, 1, TokenInputs(bytes(4000)), Generate(SamplingParams(temperature=0.5, top_p=0.9))),
            FrontendMessage,
        ),
        ("StepOutputs, 64 tokens", outputs(64), CoreMessage),
        ("StepOutputs, 1024 tokens", outputs(1024), CoreMessage),
    ]
    for name, message, union in messages:
        decoder, encoded = msgspec.msgpack.Decoder(union), encoder.encode(message)
        table.add(f"encode {name} ({len(encoded)} B)", timed(lambda m=message: encoder.encode(m), rounds))
        table.add(f"decode {name}", timed(lambda d=decoder, e=encoded: d.decode(e), rounds))
    for name, plan in (
        (f"StepPlan, {ROWS} decode rows as before", example_plan(ROWS, same=True)),
        (f"StepPlan, {ROWS} decode rows + 2048 prompt tokens", example_plan(ROWS, 2048)),
    ):
        words = plan.encode()
        table.add(f"encode {name} ({4 * len(words)} B)", timed(plan.encode, rounds))
        table.add(f"decode {name}", timed(lambda w=words, p=plan: decode_plan(w, p.decode_rows), rounds))


def measure_ring_calls(table: Table, rounds: int) -> None:
    """Both ends in this process: the cost of the calls alone."""
    ring = PlanRing.create(1 << 16, 1)
    reader = PlanReader.attach([os.dup(fd) for fd in ring.fds(0)])
    words = example_plan(ROWS).encode()

    def write_and_read() -> None:
        ring.write(KIND_PLAN, words, 1.0)
        reader.read(0.0)

    table.add(f"PlanRing write + read, {4 * len(words)} B", timed(write_and_read, rounds))
    reader.close()
    ring.close()
    results = ResultRing.create(1024)
    tokens = np.arange(ROWS, dtype=np.int32)
    results.write(1, tokens)
    table.add(f"ResultRing ready, {ROWS} rows, no", timed(lambda: results.ready(2, ROWS), rounds))
    table.add(f"ResultRing ready, {ROWS} rows, yes", timed(lambda: results.ready(1, ROWS), rounds))
    table.add(f"ResultRing samples, {ROWS} rows", timed(lambda: results.samples(1, ROWS), rounds))
    table.add(f"ResultRing write, {ROWS} rows", timed(lambda: results.write(1, tokens), rounds))
    rows = np.arange(32)
    top = np.zeros((32, 20), np.int32)
    logprobs = RowLogprobs(rows, np.zeros(32, np.float32), np.ones(32, np.int32), top, top.view(np.float32))
    table.add("ResultRing write, 32 of its rows with 20 logprobs", timed(lambda: results.write(1, tokens, logprobs), rounds))
    table.add("ResultRing ready, 32 of its rows with logprobs, yes", timed(lambda: results.ready(1, ROWS, 0, rows), rounds))
    table.add("ResultRing logprobs, 32 rows", timed(lambda: results.logprobs(1, rows), rounds))
    results.close()


def measure_step(table: Table, rounds: int, readers: int, spin: bool) -> None:
    """Plan out, tokens back: core and workers in separate processes, both spinning or both asleep in poll."""
    ring, results = PlanRing.create(1 << 16, readers), ResultRing.create(1024)
    children: list[Child] = []
    for r in range(readers):
        result_fds = results.fds() if r == 0 else []
        role = Role(name="worker", ring_fds=ring.fds(r), result_fds=result_fds, spin_s=60.0 if spin else 0.0)
        children.append(spawn(MODULE, role, [*role.ring_fds, *role.result_fds]))
    words = example_plan(ROWS).encode()
    poller = zmq.Poller()
    poller.register(results.fileno(), zmq.POLLIN)

    def step(number: int) -> None:
        words[0] = number
        ring.write(KIND_PLAN, words, 60.0)
        while not results.ready(number, ROWS):
            if not spin and results.arm(number, ROWS):
                poller.poll(1000)
                results.disarm()
                results.drain_doorbell()
        results.samples(number, ROWS)

    step(1)
    times = []
    for number in range(2, rounds + 2):
        started = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - started)
    ring.write(KIND_SHUTDOWN, NO_ROWS, 1.0)
    for child in children:
        child.wait(10.0)
        child.terminate(1.0)
    ring.close()
    results.close()
    how = "spinning" if spin else "asleep in poll"
    note = "(more spinning processes than cores)" if spin and readers + 1 > len(os.sched_getaffinity(0)) else ""
    table.add(f"plan out, tokens back, {readers} worker{'s' * (readers > 1)}, {how}", times, note=note)


def measure_zmq(table: Table, rounds: int, curve: bool) -> None:
    """A frontend in its own process and the core here: request out, token back; then messages at full speed."""
    transport, address, core_keys, keys = "ZeroMQ ipc", None, None, None
    if curve:
        own, theirs = make_keys(), make_keys()
        transport, address = "tcp + CURVE", "tcp://127.0.0.1:*"
        core_keys, keys = CoreKeys(own, frozenset([theirs.public])), FrontendKeys(theirs, own.public)
    core_link = CoreToFrontends(address, epoch=1, keys=core_keys)
    limits = EngineLimits(1024, 512, 64, 20)
    core_link.set_welcome(Welcome(1, PROTOCOL_VERSION, ["m"], limits, [], [0], "0", 0, 60.0), {})
    poller = zmq.Poller()
    for source in core_link.sockets():
        poller.register(source, zmq.POLLIN)
    child = spawn(MODULE, Role(name="frontend", address=core_link.address, rounds=rounds, keys=keys))
    one, step = outputs(1), outputs(STREAM)
    send_times: list[float] = []
    heartbeat_at = 0.0
    while (said := child.receive(0.0)) is None and child.poll() is None:
        poller.poll(20)
        for identity, message in core_link.receive():
            if isinstance(message, AddRequest) and message.id == ECHO:
                core_link.send(identity, one)
                continue
            for _ in range(rounds):
                started = time.perf_counter()
                core_link.send(identity, step)
                send_times.append(time.perf_counter() - started)
        core_link.flush()
        if time.monotonic() > heartbeat_at:
            heartbeat_at = time.monotonic() + 0.5
            core_link.broadcast(Heartbeat(1, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0, True))
    child.terminate(10.0)
    core_link.close()
    assert said is not None, "the frontend has ended early"
    report = msgspec.json.decode(said["report"])
    table.add(f"{transport}: request of 1000 tokens out, first token back", report["times"][rounds // 10 :])
    merged = f"(merged: {report['merged']:.1f} steps a message)"
    table.add(f"{transport}: steps of {STREAM} tokens at full speed, each", report["per_step"], note=merged)
    table.add(f"{transport}: CoreToFrontends.send, StepOutputs of {STREAM} tokens", send_times)


def measure_control(table: Table, rounds: int) -> None:
    """A worker in its own process and the core's end here: a command and its answer; then large results at full speed."""
    core_link = CoreToWorkers(generation=1)
    poller = zmq.Poller()
    for source in core_link.sockets():
        poller.register(source, zmq.POLLIN)
    child = spawn(MODULE, Role(name="control", address=core_link.address))

    def receive(expected: int) -> None:
        while expected > 0:
            assert poller.poll(10_000), "the worker has not answered in time"
            expected -= len(core_link.receive(limit=expected))

    receive(1)  # the worker is ready
    times = []
    for _ in range(rounds + rounds // 10):
        started = time.perf_counter()
        core_link.send(0, AllocateKV(1))
        receive(1)
        times.append(time.perf_counter() - started)
    table.add("worker control link: command out, answer back", times[rounds // 10 :])
    window, per_message = max(2, rounds // 20), []
    for _ in range(WINDOWS + 1):
        started = time.perf_counter()
        core_link.send(0, AllocateKV(window))
        receive(window)
        per_message.append((time.perf_counter() - started) / window)
    kib = 4 * POSITIONS * (2 + 2 * NUM_TOP) / 1024
    table.add(f"worker control link: {POSITIONS} prompt logprobs + top {NUM_TOP} ({kib:.0f} KiB)", per_message[1:])
    core_link.send(0, AllocateKV(0))
    child.wait(10.0)
    child.terminate(1.0)
    core_link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    rounds = parser.parse_args().rounds
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # so that children find this module
    cores = len(os.sched_getaffinity(0))
    versions = (
        f"Python {platform.python_version()}, pyzmq {zmq.__version__}, msgspec {msgspec.__version__}, numpy {np.__version__}"
    )
    print(f"{cores} cores, {platform.machine()}; {versions}\n")
    table = Table()
    measure_codecs(table, rounds)
    measure_ring_calls(table, rounds)
    for spin in (True, False):
        for readers in (1, 2):
            measure_step(table, rounds, readers, spin)
    for curve in (False, True):
        measure_zmq(table, rounds, curve)
    measure_control(table, rounds)
    print("RESULT " + msgspec.json.encode({"benchmark": "ipc", "cores": cores, "rows": table.rows}).decode())


if __name__ == "__main__":
    child_main() if "--control-fd" in sys.argv else main()
