"""Clients of frontend.py, in processes of their own: whole answers one after the other, and how late each streamed token comes.

To measure lateness the replay engine sends stamps: tokens that decode to known words, one for each step (modulo STAMPS), and
writes the time at which it sent that step to a file that both map. A client that receives a word knows how long ago it was
sent: the whole way from the engine's socket through the frontend to the client's socket.
"""

import array
import asyncio
import contextlib
import gc
import json
import mmap
import multiprocessing
import multiprocessing.connection
import re
import resource
import time
from typing import Any, NamedTuple

import numpy as np
import uvloop
from sse_client import Connection, Target
from tokenizers import Tokenizer

STAMPS = 256
_TEXT = re.compile(rb'"(?:content|text)": ?"( [^"]*)"')


def stamp_tokens(backend: Tokenizer) -> dict[str, int]:
    """STAMPS words, a space and letters each, with the ids of their tokens."""
    found = {}
    for token_id in range(backend.get_vocab_size()):
        text = backend.decode([token_id], skip_special_tokens=False)
        if re.fullmatch(r" [a-z]{2,}", text) and len(found) < STAMPS:
            found[text] = token_id
    assert len(found) == STAMPS
    return found


class Whole(NamedTuple):
    """Non-streamed answers: their number, and the seconds that they took."""

    count: int
    seconds: float


def whole_answers(target: Target, body: dict[str, Any], connections: int, seconds: float, processes: int) -> Whole:
    """Send requests one after the other on each of so many connections."""
    data = target.request(json.dumps(body).encode())
    parts = _in_processes(_ask_whole, [(target, data, connections // processes, seconds)] * processes)
    return Whole(sum(parts), seconds)


async def _ask_whole(target: Target, data: bytes, connections: int, seconds: float) -> int:
    count, stop = 0, time.perf_counter() + seconds

    async def one() -> None:
        nonlocal count
        connection = await Connection.open(target)
        while time.perf_counter() < stop:
            _, done = connection.send(data)
            answer = await done
            assert answer.status == 200, (answer.status, answer.error, answer.body[:200])
            count += 1
        connection.abort()

    await asyncio.gather(*(one() for _ in range(connections)))
    return count


def lateness(target: Target, body: dict[str, Any], streams: int, seconds: float, processes: int, words: list[str],
             sent_at: str) -> np.ndarray:  # fmt: skip
    """Seconds since the engine sent it, for each token that arrived in the last `seconds` of all these streams."""
    data = target.request(json.dumps(body).encode())
    shares = [streams // processes + (i < streams % processes) for i in range(processes)]
    arguments = [(target, data, share, seconds, words, sent_at) for share in shares]
    return np.concatenate([np.frombuffer(part, np.float32) for part in _in_processes(_listen, arguments)])


class _Late(asyncio.Protocol):
    """One stream's chunks, searched as bytes."""

    late: array.array
    indices: dict[bytes, int]
    times: "memoryview[float]"
    counting = False

    def data_received(self, data: bytes) -> None:
        if not _Late.counting:
            return
        now, late, indices, times = time.monotonic(), _Late.late, _Late.indices, _Late.times
        for match in _TEXT.finditer(data):
            for word in match[1].split(b" ")[1:]:
                if (index := indices.get(b" " + word)) is not None:
                    late.append(now - times[index])


async def _listen(target: Target, data: bytes, streams: int, seconds: float, words: list[str], sent_at: str) -> bytes:
    with open(sent_at, "rb") as file:
        _Late.times = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("d")
    _Late.indices = {word.encode(): i for i, word in enumerate(words)}
    _Late.late = array.array("f")
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(streams):
        transport, _protocol = await loop.create_connection(_Late, target.host, target.port)
        transport.write(data)
        transports.append(transport)
        await asyncio.sleep(0)
    await asyncio.sleep(2.0 + streams / 500)  # until all streams run
    _Late.counting = True
    await asyncio.sleep(seconds)
    _Late.counting = False
    for transport in transports:
        transport.abort()
    return _Late.late.tobytes()


def _in_processes(function: Any, arguments: list[tuple]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    children = []
    try:
        for each in arguments:
            mine, theirs = context.Pipe()
            child = context.Process(target=_child, args=(theirs, function, each), daemon=True)
            child.start()
            theirs.close()
            children.append((child, mine))
        for _, pipe in children:
            pipe.recv()
        for _, pipe in children:
            pipe.send("go")
        return [pipe.recv() for _, pipe in children]
    except EOFError:
        raise RuntimeError("a client process ended early; its messages are above") from None
    finally:
        for child, _ in children:
            child.kill()


def _child(pipe: multiprocessing.connection.Connection, function: Any, arguments: tuple) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()
    pipe.send("ready")
    pipe.recv()
    pipe.send(uvloop.run(function(*arguments)))
