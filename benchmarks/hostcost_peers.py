"""The two other processes of hostcost.py: a worker that only keeps time and writes results, and a frontend that only reads.

hostcost_peers.py worker FDS STEP_MS STEPS              FDS: JSON, the descriptors of the plan ring and of the result ring
hostcost_peers.py frontend ADDRESS ROWS MAX_TOKENS
"""

import json
import os
import sys
import time
from collections import deque

import msgspec
import numpy as np
import zmq

from quire.ipc.messages.frontend import PROTOCOL_VERSION, AddRequest, CoreMessage, Generate, Hello, Ping, TokenInputs
from quire.ipc.messages.message import IDENTITY_BYTES
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan_ring import PlanReader
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER

MAX_PROMPT = 128  # prompts are staggered, so that rows do not fill their blocks in the same step
NUM_DECODE_ROWS, NUM_PREFILL_ROWS = HEADER.at["num_decode_rows"], HEADER.at["num_prefill_rows"]
clock = time.perf_counter_ns


def worker(fds: str, step_ms: float, steps: int) -> None:
    """A GPU's clock: steps run one after the other, `step_ms` each; at the end of a step its result is written. Reports, for
    each steady step, the time from there to the arrival of the plan made from it: the second next one, as two are in flight.
    """
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
            step, decode_rows = int(words[HEADER.at["step"]]), int(words[NUM_DECODE_ROWS])
            ends = max(now, ends) + int(step_ms * 1e6)
            running.append((step, decode_rows + int(words[NUM_PREFILL_ROWS]), ends))
            if step - 2 in written and decode_rows == rows:
                waits.append((now - written[step - 2]) / 1e3)
        if running and now >= running[0][2]:
            step, count, _ = running.popleft()
            ring.write(step, np.full(count, 7, np.int32))
            written[step] = clock()
    print(json.dumps(waits[200:]), flush=True)
    sys.stdin.read()


def frontend(address: str, rows: int, max_tokens: int) -> None:
    """Send the requests, then read and drop all messages until the core's process closes our standard input."""
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
                    prompt = rng.integers(10, 30000, int(rng.integers(1, MAX_PROMPT)), np.int32)
                    dealer.send(encode(AddRequest(epoch, i, TokenInputs(prompt.tobytes()), Generate(params))))
        if time.monotonic() > pinged + 1:
            dealer.send(encode(Ping(epoch)))
            pinged = time.monotonic()
    dealer.close()
    context.term()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", fds, step_ms, steps]:
            worker(fds, float(step_ms), int(steps))
        case ["frontend", address, rows, max_tokens]:
            frontend(address, int(rows), int(max_tokens))
