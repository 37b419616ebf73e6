"""A server that streams pre-made events at a given rate, to test a load generator before it measures a server.

It answers any POST that has `max_tokens` in its body with that many text events, a finish and a usage event, as chunked
server-sent events. Like an engine it works in steps: every `interval_s` each open answer gets one event, so 256 connections at
50,000 tokens/s get one every 5.1 ms. Several processes share the port (SO_REUSEPORT), each with a clock of its own. `Sink.stop`
returns how long the steps really took: more than the interval means that the sink was too slow.
"""

import asyncio
import gc
import multiprocessing
import multiprocessing.connection
import re
import socket
import time
from typing import Any

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"sink",'
    b'"choices":[{"index":0,%b}]%b}\n\n'
)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TEXT = chunk(_EVENT % (b'"text":" word","logprobs":null,"finish_reason":null', b""))
_FINISH = _EVENT % (b'"text":"","logprobs":null,"finish_reason":"length","stop_reason":null', b"")


def last_events(num_tokens: int) -> bytes:
    """The events after the last text: finish, usage, [DONE], the end of the chunked body."""
    usage = b',"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}' % (num_tokens, num_tokens + 1)
    return chunk(_FINISH) + chunk(b'data: {"choices":[]%b}\n\n' % usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, open_answers: "dict[_Connection, int]") -> None:
        self._open = open_answers
        self._data = b""
        self.asked = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not found or length is None or len(body) < int(length[1]):
            return
        match = _MAX_TOKENS.search(body)
        self.asked = int(match[1]) if match else 16
        self._data = b""
        self.transport.write(_HEAD)
        self._open[self] = self.asked


async def _serve(listener: socket.socket, interval_s: float, pipe: multiprocessing.connection.Connection) -> None:
    answers: dict[_Connection, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answers), sock=listener, backlog=4096)
    stop = asyncio.Event()
    loop.add_reader(pipe.fileno(), stop.set)
    steps, busy_s, first, last, due = 0, 0.0, 0.0, 0.0, time.perf_counter()
    pipe.send("ready")
    while not stop.is_set():
        now = time.perf_counter()
        if now < due:
            await asyncio.sleep(due - now if due - now > 2e-3 else 0)
            continue
        due = max(due + interval_s, now)
        if not answers:
            await asyncio.sleep(0)
            continue
        for connection, left in list(answers.items()):
            if left > 1:
                connection.transport.write(TEXT)
                answers[connection] = left - 1
            else:
                connection.transport.write(TEXT + last_events(connection.asked))
                del answers[connection]
        last = time.perf_counter()
        first = first or now
        busy_s += last - now
        steps += 1
        await asyncio.sleep(0)
    server.close()
    pipe.send((steps, busy_s, last - first))


def _run(port: int, interval_s: float, pipe: multiprocessing.connection.Connection) -> None:
    gc.disable()
    uvloop.run(_serve(_listener(port), interval_s, pipe))


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    return listener


class Sink:
    """The sink's processes. interval_s: time between two tokens of an answer."""

    def __init__(self, interval_s: float, processes: int) -> None:
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        context = multiprocessing.get_context("spawn")
        self._children = []
        for _ in range(processes):
            mine, theirs = context.Pipe()
            child = context.Process(target=_run, args=(port, interval_s, theirs), daemon=True)
            child.start()
            self._children.append((child, mine))
        for _, pipe in self._children:
            pipe.recv()
        reserved.close()

    def stop(self) -> dict[str, float]:
        """The steps' real time, and the fraction of a core spent on writing; of each, the largest of all processes."""
        totals = []
        for child, pipe in self._children:
            pipe.send("stop")
            totals.append(pipe.recv())
            child.join(5)
            child.kill()
        worked = [t for t in totals if t[0] > 1]
        if not worked:
            return {"step_ms": float("nan"), "busy": float("nan")}
        return {
            "step_ms": round(1e3 * max(span / (steps - 1) for steps, _, span in worked), 3),
            "busy": round(max(busy / max(span, 1e-9) for _, busy, span in worked), 3),
        }
