"""A message as Anthropic's server-sent events (https://docs.claude.com/en/docs/build-with-claude/streaming).

`EventWriter` encodes a message's beginning, steps and end; `MessageStream` sends one request's stream. After the first output,
a stream that has been silent for PING_S sends a `ping`.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.generate import Pump
from quire.frontend.http.api.messages.blocks import Closed, Opened, Piece, Step
from quire.frontend.http.api.messages.schemas import MessagesResponse, MessagesUsage
from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Response, ResponseState

PING_S = 10.0
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_END = b"}}\n\n"
_DELTAS = {
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "tool_use": b'"input_json_delta","partial_json":',
}
_OPENINGS = {"text": b'{"type":"text","text":""}', "thinking": b'{"type":"thinking","thinking":"","signature":""}'}


class EventWriter:
    """Encodes events; each method returns whole ones."""

    def __init__(self) -> None:
        self._delta = b""  # the bytes before the next piece of the open content block

    def opening(self, message: MessagesResponse) -> bytes:
        return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % json_bytes(message) + PING

    def text(self, text: str) -> bytes:
        """A piece of the open content block."""
        return self._delta + json_bytes(text) + _END

    def step(self, step: Step) -> bytes:
        match step:
            case Piece():
                return self.text(step.text)
            case Opened():
                return self._opened(step)
            case Closed():
                return self._closed(step)

    def _opened(self, step: Opened) -> bytes:
        delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
        self._delta = delta % (step.index, _DELTAS[step.kind])
        block = _OPENINGS.get(step.kind)
        if block is None:
            block = b'{"type":"tool_use","id":%b,"name":%b,"input":{}}' % (json_bytes(step.id), json_bytes(step.name))
        start = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
        return start % (step.index, block)

    def _closed(self, step: Closed) -> bytes:
        signed = b""
        if step.kind == "thinking":
            delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
            signed = delta % step.index + b'{"type":"signature_delta","signature":%b}}\n\n' % json_bytes(step.signature)
        return signed + b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % step.index

    def closing(self, stop_reason: str, stop_sequence: str | None, usage: MessagesUsage) -> bytes:
        reasons = json_bytes(stop_reason), json_bytes(stop_sequence), json_bytes(usage)
        delta = b'{"type":"message_delta","delta":{"stop_reason":%b,"stop_sequence":%b},"usage":%b}' % reasons
        return b"event: message_delta\ndata: %b\n\n" % delta + _STOP


class Events(Protocol):
    """Makes events of a stream's deltas (answer.py)."""

    def begin(self) -> bytes: ...
    def read(self, delta: Delta) -> bytes: ...


class MessageStream:
    """One response (generate.StreamedAnswer), with pings while it is silent."""

    def __init__(self, response: Response, metrics: Metrics, answer: Events) -> None:
        self._response = response
        self._metrics = metrics
        self._answer = answer
        self._is_silent = False
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, run: PromptRun) -> None:
        self._watch()
        try:
            await Pump(self._response, [run], self._metrics, self).run()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def opening(self, run: PromptRun) -> bytes:
        return self._answer.begin()

    def events(self, run: PromptRun, delta: Delta) -> bytes:
        return self._read(delta)

    def writer(self, run: PromptRun) -> Callable[[Delta], bytes]:
        return self._read

    async def closing(self) -> bytes:
        return b""

    def _read(self, delta: Delta) -> bytes:
        data = self._answer.read(delta)
        self._is_silent = self._is_silent and not data
        return data

    def _watch(self) -> None:
        """Called every PING_S; sends a ping if nothing was sent since the last call."""
        response = self._response
        if self._is_silent and response.state is ResponseState.STREAMING and not response.write_paused:
            response.write(PING)
        self._is_silent = True
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._watch)
