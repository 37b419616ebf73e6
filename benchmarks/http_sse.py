"""Cost of streaming over HTTP per token, in one frontend process: chat requests that get one token in each step.

    http: scripted streams -> SSE chunks -> protocol -> a transport that drops the bytes
    all:  encoded StepOutputs -> dispatch -> detokenize -> SSE -> protocol -> the same transport: everything but the sockets
    tcp:  the same, through uvloop's TCP sockets to a process that reads and drops
    whole: us per non-streamed chat request, with a stream that has already ended

Times are this process's CPU time (its event loop does nothing else), so other load matters little. The bias: all streams get a
token in the same step, as in a steady batch, and text is a few ASCII characters a token.
`python benchmarks/http_sse.py [--streams 256] [--steps 400]`; the last line is one JSON object of us per chunk.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.frontend.client.dispatch import Dispatcher
from quire.frontend.client.outputs import Delta, RequestMetrics
from quire.frontend.client.stream import RequestState, Stream
from quire.frontend.http.api.app import App
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.connection import Connection
from quire.frontend.http.server_state import ServerState
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import CoreMessage, EngineLimits, Finished, Started, StepOutputs, Welcome

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 10**6}
VOCAB_SIZE = 4000


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE trained on this repository's own text."""
    texts = [p.read_text() for p in sorted((Path(__file__).parent.parent / "ipc").glob("*.py"))]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    return Tokenizer(backend, chat_templates={"default": "{{ messages[0].content }}"})


class Client:
    """A stand-in for AsyncClient to the routes, without a core."""

    media = None

    def __init__(self, make_stream: Callable) -> None:
        self.tokenizer = make_tokenizer()
        limits = EngineLimits(10**7, VOCAB_SIZE, 1024, 20)
        self.welcome = Welcome(1, 1, ["model"], limits, [], [], "0", 1, 60.0)
        self.streams: list = []
        self._make_stream = make_stream

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def submit(self, ids, params, **_):
        self.streams.append(self._make_stream(self, ids, params))
        return self.streams[-1]


class ScriptedStream:
    """The cheapest possible stream: a future for each turn."""

    num_prompt_tokens = num_cached_tokens = 1
    prompt_logprobs = error = None
    items = ()

    def __init__(self) -> None:
        self.metrics = RequestMetrics(time.time())
        self.deltas: list[Delta] | None = None
        self.waiter: asyncio.Future | None = None
        self.ended = False

    def push(self, delta: Delta, last: bool) -> None:
        self.deltas, self.ended = [delta], last
        if self.waiter is not None:
            self.waiter.set_result(None)
            self.waiter = None

    def __aiter__(self):
        return self

    async def __anext__(self):
        while self.deltas is None:
            if self.ended:
                raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        deltas, self.deltas = self.deltas, None
        return deltas

    async def collect(self):
        return [Delta(0, "Hello", [1], None, "stop", None, 1)]

    @property
    def finished(self) -> bool:
        return self.ended

    def cancel(self) -> None:
        pass


class Sink(asyncio.Transport):
    """A transport that counts and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.last = b""

    def write(self, data) -> None:
        self.num_bytes += len(data)
        self.last = data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def request_bytes(**more) -> bytes:
    body = json.dumps({**BODY, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def step_messages(keys: list[int], steps: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    wire_keys, encoded = np.array(keys, "<i8").tobytes(), []
    for step in range(steps):
        tokens = rng.integers(1, VOCAB_SIZE, len(keys), dtype="<i4")
        finished = [Finished(k, "length") for k in keys] if step == steps - 1 else []
        started = [Started(k, 0, 0.0) for k in keys] if step == 0 else []
        encoded.append(msgspec.msgpack.encode(StepOutputs(1, step, wire_keys, tokens.tobytes(), finished, started)))
    return encoded


class Counts:
    def __init__(self, seconds: float, num_bytes: int) -> None:
        self.seconds, self.num_bytes = seconds, num_bytes


async def run(case: str, num_streams: int, steps: int) -> Counts:
    dispatcher = Dispatcher(lambda message: None)
    client = Client(lambda c, ids, params: new_stream(case, c, ids, params, dispatcher))
    server = ServerState(App(Services.make(client)))
    sinks: list[Sink] = []
    if case == "tcp":
        await connect_reader(server, num_streams)
    else:
        for _ in range(num_streams):
            sinks.append(Sink())
            connection = Connection(server)
            connection.connection_made(sinks[-1])
            connection.data_received(request_bytes())
    while len(client.streams) < num_streams:
        assert not any(sink.last for sink in sinks), f"a request was refused: {sinks[0].last!r}"
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    if case == "http":
        deltas = [Delta(0, f" word{i}", [i], num_tokens=i + 1) for i in range(steps)]
        deltas[-1].finish_reason = "length"
        turns: list = [lambda d=d, last=d is deltas[-1]: [s.push(d, last) for s in client.streams] for d in deltas]
    else:
        decoder = msgspec.msgpack.Decoder(CoreMessage)
        keys = [s._state.sequences[0].key for s in client.streams]
        turns = [lambda data=data: dispatcher.outputs(decoder.decode(data)) for data in step_messages(keys, steps)]
    start = time.process_time()
    for turn in turns:
        turn()
        await asyncio.sleep(0)
        while any(c.write_paused for c in server.connections):
            await asyncio.sleep(0.001)
    while any(c._task is not None for c in server.connections):
        await asyncio.sleep(0)
    seconds = time.process_time() - start
    assert all(s.last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for s in sinks), "an answer did not come to its end"
    return Counts(seconds, sum(s.num_bytes for s in sinks))


async def answer_whole(num_requests: int) -> Counts:
    """Requests one after the other on one connection."""
    server = ServerState(App(Services.make(Client(lambda c, ids, params: ScriptedStream()))))
    sink, connection, data = Sink(), Connection(server), request_bytes(stream=False)
    connection.connection_made(sink)
    start = time.process_time()
    for _ in range(num_requests):
        connection.data_received(data)
        while connection._task is not None:
            await asyncio.sleep(0)
    assert sink.last.startswith(b"HTTP/1.1 200 ")
    return Counts(time.process_time() - start, sink.num_bytes)


def new_stream(case: str, client: Client, ids, params, dispatcher: Dispatcher):
    if case == "http":
        return ScriptedStream()
    state = RequestState(len(client.streams) + 1, "", np.array(ids, dtype=np.int32), params, client.tokenizer, 0.0)
    dispatcher.add(state)
    return Stream(state, dispatcher.cancel)


async def connect_reader(server: ServerState, num_streams: int) -> None:
    """A listening socket, and a process that sends the requests and reads the answers."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    reader = multiprocessing.get_context("spawn").Process(target=read_and_drop, args=(port, num_streams), daemon=True)
    reader.start()


def read_and_drop(port: int, num_streams: int) -> None:
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request_bytes())
        selector.register(sock, selectors.EVENT_READ)
    buffer = bytearray(1 << 16)
    while True:
        for key, _ in selector.select():
            if key.fileobj.recv_into(buffer) == 0:
                sys.exit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    result: dict[str, object] = {"python": platform.python_version(), "streams": args.streams, "steps": args.steps}
    for case in ("http", "all", "tcp"):
        runs = [uvloop.run(run(case, args.streams, args.steps)) for _ in range(3)]
        best = min(runs, key=lambda c: c.seconds)
        us = best.seconds / (args.streams * args.steps) * 1e6
        result[f"{case}_us_per_chunk"] = round(us, 2)
        size = f", {best.num_bytes / args.streams / args.steps:.0f} bytes a chunk" if best.num_bytes else ""
        print(f"{case}: {us:.2f} us per chunk, {1e6 / us:,.0f} chunks/s{size}", flush=True)
    us = min(uvloop.run(answer_whole(5000)).seconds for _ in range(3)) / 5000 * 1e6
    result["whole_us_per_request"] = round(us, 1)
    print(f"whole: {us:.1f} us per request, {1e6 / us:,.0f} requests/s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
