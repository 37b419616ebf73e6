"""Requests that might block a frontend's event loop for others, and the worst gap of another stream while each runs.

A witness streams a token each step of the replay engine (replay_engine.py), on the same frontend, and notes when each chunk
arrives; the worst gap is the longest time between two chunks, to compare with the gap when nothing else runs. The nasty request
is sent over a plain socket in another thread, which reads and drops the answer. Used by frontend.py, for any server with
OpenAI's API. Bias: on a machine with few cores, client and engine take time from the frontend; the quiet gap shows it.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sse_client import Connection, Target

WORDS = "The quick brown fox jumps over the lazy dog while the rain in Spain stays mainly in the plain. "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Nasty(NamedTuple):
    """path and body of a request; leave_s: seconds after which the client disconnects, for requests that would take minutes."""

    path: str
    body: Callable[[], Any]
    leave_s: float = 60.0


def _text(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]


def _chat(content: Any = "hi", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * count, "max_tokens": 4, **more}


def _tools(num_bytes: int) -> list[dict[str, Any]]:
    properties = {f"parameter_{i}": {"type": "string", "description": _text(60)} for i in range(40)}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "description": _text(90), "parameters": parameters}}
    return [tool] * min(1024, num_bytes // len(json.dumps(tool)))


def _chat_with_call(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 4}


def _nested(depth: int) -> bytes:
    return b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"


CASES: dict[str, Nasty] = {
    "n 128, 20 logprobs": Nasty(
        CHAT, lambda: _chat(n=128, logprobs=True, top_logprobs=20, max_completion_tokens=250, max_tokens=None)
    ),
    "n 128, 20 logprobs, streamed": Nasty(
        CHAT, lambda: _chat(n=128, logprobs=True, top_logprobs=20, max_completion_tokens=250, max_tokens=None, stream=True)
    ),
    "completions, n 128, 20 logprobs": Nasty(COMPLETIONS, lambda: {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 250}),
    "n 128, 1,000 tokens each": Nasty(COMPLETIONS, lambda: {"prompt": "a", "n": 128, "max_tokens": 1000}),
    "230 kB of bad_words": Nasty(COMPLETIONS, lambda: {"prompt": "a", "bad_words": [f"{i} " + _text(890) for i in range(256)]}),
    "230 kB of bad_words, short": Nasty(
        COMPLETIONS, lambda: {"prompt": ["a"] * 256, "max_tokens": 1, "bad_words": [f"w{i}" for i in range(128)]}
    ),
    "64 stop strings of 1,024, n 128": Nasty(
        COMPLETIONS, lambda: {"prompt": "a", "n": 128, "stop": [f"{i}" + "ab" * 500 for i in range(64)], "max_tokens": 50}
    ),
    "7.6 MB of tools": Nasty(CHAT, lambda: _chat(tools=_tools(7_600_000))),
    "one tool of 7 MB": Nasty(
        CHAT,
        lambda: _chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": [_text(20)] * 300_000}}}]),
    ),
    "a prompt of 128k tokens, as text": Nasty(COMPLETIONS, lambda: {"prompt": _text(400_000), "max_tokens": 4}),
    "a prompt of 8 MB, as text": Nasty(COMPLETIONS, lambda: {"prompt": _text(7_900_000), "max_tokens": 4}),
    "1,024 prompts": Nasty(COMPLETIONS, lambda: {"prompt": [_text(7_000)] * 1024, "max_tokens": 4}),
    "1,024 prompts, streamed with usage": Nasty(
        COMPLETIONS,
        lambda: {
            "prompt": ["a"] * 1024,
            "n": 2,
            "max_tokens": 100,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "16k messages": Nasty(CHAT, lambda: _chat("hello there", 16_384)),
    "one message of 7 MB": Nasty(CHAT, lambda: _chat(_text(7_000_000))),
    "documents of 7 MB": Nasty(CHAT, lambda: _chat(documents=[{"title": "t", "text": _text(7_000)}] * 1000)),
    "tool calls of 7 MB": Nasty(CHAT, lambda: _chat_with_call(json.dumps({"a": [1] * 2_300_000}))),
    "tool calls of 7 MB, a text": Nasty(CHAT, lambda: _chat_with_call(json.dumps({"a": _text(6_900_000)}))),
    "deep JSON": Nasty(CHAT, lambda: _nested(3_000_000)),
    "3 M empty lists": Nasty(COMPLETIONS, lambda: b'{"prompt":[' + b"[]," * 2_700_000 + b"[]]}"),
    "1 M small objects": Nasty(CHAT, lambda: b'{"messages":[{"role":"user","content":[' + b'{"a":1},' * 900_000 + b"{}]}]}"),
    "1 M unknown fields": Nasty(
        COMPLETIONS, lambda: b'{"prompt":"a",' + b",".join(b'"f%d":%d' % (i, i) for i in range(400_000)) + b"}"
    ),
    "4 M numbers": Nasty(COMPLETIONS, lambda: b'{"prompt":[' + b"1," * 4_000_000 + b"1]}"),
    "echo, n 128, prompt of 120k tokens": Nasty(
        COMPLETIONS, lambda: {"prompt": [300] * 120_000, "echo": True, "n": 128, "max_tokens": 2, "return_token_ids": True}
    ),
    "echo, n 128, long prompt, streamed": Nasty(
        COMPLETIONS,
        lambda: {"prompt": [300] * 120_000, "echo": True, "n": 128, "max_tokens": 2, "return_token_ids": True, "stream": True},
    ),
    "echo with 20 logprobs of 50k tokens": Nasty(
        COMPLETIONS, lambda: {"prompt": [300] * 50_000, "echo": True, "logprobs": 20, "max_tokens": 2}
    ),
    "echo with 20 logprobs, streamed": Nasty(
        COMPLETIONS, lambda: {"prompt": [300] * 50_000, "echo": True, "logprobs": 20, "max_tokens": 2, "stream": True}
    ),
    "prompt_logprobs of 50k tokens": Nasty(
        COMPLETIONS, lambda: {"prompt": [300] * 50_000, "prompt_logprobs": 20, "max_tokens": 2}
    ),
    "allowed_token_ids, all": Nasty(
        COMPLETIONS, lambda: {"prompt": ["a"] * 32, "allowed_token_ids": list(range(2800)), "max_tokens": 2}
    ),
    "tokenize 8 MB": Nasty("/tokenize", lambda: {"prompt": _text(7_900_000), "return_token_strs": True}),
    "detokenize 1 M ids": Nasty("/detokenize", lambda: {"tokens": [300 + i % 500 for i in range(1 << 20)]}),
    "a client of 1,024 prompts leaves": Nasty(
        COMPLETIONS, lambda: {"prompt": ["a"] * 1024, "n": 2, "max_tokens": 100_000, "stream": True}, leave_s=2.0
    ),
}


class Gaps(NamedTuple):
    """In seconds, the witness' worst gap while the request ran, and its duration; the answer's status and size."""

    worst_s: float
    took_s: float
    status: int
    num_bytes: int


class Witness:
    """One endless stream of the server, and the gaps between its chunks."""

    def __init__(self, target: Target, model: str) -> None:
        self._target, self._model = target, model
        self._worst, self._last = 0.0, 0.0

    async def start(self) -> None:
        self._connection = await Connection.open(self._target)
        body = {"model": self._model, "prompt": [300, 301], "max_tokens": 100_000, "stream": True, "ignore_eos": True}
        answer, self._done = self._connection.send(self._target.request(json.dumps(body).encode(), COMPLETIONS))
        answer.on_chunk = self._on_chunk
        while not self._last:
            assert not self._done.done(), self._done.result().error
            await asyncio.sleep(0.01)

    def _on_chunk(self) -> None:
        now = time.perf_counter()
        if self._last:
            self._worst = max(self._worst, now - self._last)
        self._last = now

    def restart(self) -> None:
        self._worst = 0.0

    def worst(self) -> float:
        """The worst gap, including the current one."""
        if self._done.done():
            raise ConnectionError(f"the witness' stream has ended: {self._done.result().error}")
        return max(self._worst, time.perf_counter() - self._last)

    def stop(self) -> None:
        self._connection.abort()


async def run_case(witness: Witness, target: Target, nasty: Nasty) -> Gaps:
    made = nasty.body()
    data = target.request(made if isinstance(made, bytes) else json.dumps(made).encode(), nasty.path)
    await asyncio.sleep(0.05)
    witness.restart()
    began = time.perf_counter()
    status, size = await asyncio.to_thread(_send_and_drop, target, data, nasty.leave_s)
    took = time.perf_counter() - began
    await asyncio.sleep(0.3)  # memory is freed after the answer
    return Gaps(witness.worst(), took, status, size)


async def quiet(witness: Witness, seconds: float) -> float:
    witness.restart()
    await asyncio.sleep(seconds)
    return witness.worst()


def _send_and_drop(target: Target, data: bytes, leave_s: float) -> tuple[int, int]:
    """(status, bytes) of an answer, read to its end or until leave_s; status 0: it ended without one."""
    with socket.create_connection((target.host, target.port), timeout=leave_s) as sock:
        head, size, deadline = b"", 0, time.monotonic() + leave_s
        try:
            sock.sendall(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            while time.monotonic() < deadline and (part := sock.recv(1 << 18)):
                head = head or part
                size += len(part)
        except OSError:
            pass
    return int(head.split()[1]) if head.startswith(b"HTTP/") else 0, size
