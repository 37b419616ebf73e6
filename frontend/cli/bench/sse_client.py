"""HTTP/1.1 and server-sent events for `quire bench serve` and benchmarks/: one request at a time per connection, some 5 us per
streamed token.

`Connection` is an asyncio protocol over a plain socket, without an HTTP library, as aiohttp reaches only 20k tokens/s per
process. It reads any OpenAI-compatible stream of /v1/completions or /v1/chat/completions: bodies chunked, sized or ended by the
connection's end, events split anywhere. A chunk counts as output if it has text (or, before any text, a finish reason); its
time is that of the read that completed it. `Answer` is the result of one request; a server's error is not raised, but noted in
`Answer.error`.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

clock = time.perf_counter  # CLOCK_MONOTONIC: comparable between the processes of a machine


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # with return_token_ids

    @property
    def has_text(self) -> bool:
        return bool(self.piece or self.token_ids)

    @property
    def piece(self) -> str:
        d = self.delta
        return self.text or (d is not None and (d.content or d.reasoning_content or d.reasoning)) or ""


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Answer:
    """One response, as far as it has arrived. Times are of `clock`: first and last output, and `gaps` between outputs in
    seconds; `end` is the last output or finish reason."""

    __slots__ = (
        "body",
        "cached_tokens",
        "end",
        "error",
        "finished",
        "first",
        "gaps",
        "last",
        "on_chunk",
        "output_tokens",
        "prompt_tokens",
        "sent",
        "status",
        "texts",
        "token_ids",
    )

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first = self.last = self.end = 0.0
        self.gaps: list[float] = []
        self.status = self.prompt_tokens = self.output_tokens = 0
        self.finished = 0  # choices with a finish reason
        self.error = ""
        self.cached_tokens: int | None = None  # of the prompt, where the server says it
        self.token_ids: list[int] = []  # where the server was asked for them
        self.body = b""  # of an answer that is not a stream
        self.texts: list[str] | None = None  # its text in pieces, if asked for
        self.on_chunk: Callable[[], None] | None = None  # called at every chunk with text


class Target(NamedTuple):
    """Where requests go."""

    host: str
    port: int
    path: str
    api_key: str | None = None
    secure: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, path: str, api_key: str | None = None) -> "Target":
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: an URL like http://127.0.0.1:8000 is needed")
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1") + path
        return cls(parts.hostname, parts.port or (443 if secure else 80), path, api_key, secure)

    def request(self, body: bytes = b"", path: str | None = None) -> bytes:
        """The bytes of a POST, or of a GET if there is no body."""
        own = any(name.lower() == "authorization" for name, _ in self.headers)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key and not own else ""
        key += "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        what = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        verb = "POST" if body else "GET"
        return f"{verb} {path or self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}{what}\r\n".encode() + body


class Body:
    """Reads a response's body: with Transfer-Encoding chunked, Content-Length, or up to the connection's end."""

    def __init__(self, chunked: bool, length: int | None) -> None:
        self.done = length == 0 and not chunked
        self._chunked = chunked
        self._left = 0 if chunked else length  # bytes missing from this chunk, or from the body; None: up to the end
        self._rest = b""  # an incomplete line of a chunk
        self._trailer = False

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that belongs to the body."""
        if not self._chunked:
            if self._left is not None:
                data = data[: self._left]
                self._left -= len(data)
                self.done = self._left == 0
            return data
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end, parts = 0, len(data), []
        while at < end and not self.done:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            stop = data.find(b"\r\n", at)
            if stop < 0:
                self._rest = data[at:]
                break
            line, at = data[at:stop], stop + 2
            if self._trailer:
                self.done = not line
            elif line:  # an empty line ends the previous chunk
                self._left = int(line.split(b";")[0], 16)
                self._trailer = self._left == 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Events:
    """Reads the data of server-sent events, one `data:` line per event. JSON has no raw line break."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, payload: bytes) -> list[bytes]:
        if b"\r" in payload:
            payload = payload.replace(b"\r", b"")
        *events, self._rest = (self._rest + payload).split(b"\n\n")
        return [e[5:].strip() for event in events for e in event.split(b"\n") if e.startswith(b"data:")]


_decode = msgspec.json.Decoder(Event).decode


class Connection(asyncio.Protocol):
    """One connection, kept alive between requests if the server does so."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._head = b""
        self._body: Body | None = None
        self._events: Events | None = None
        self._keep = True

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        """Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, target.host, target.port, ssl=target.secure)
        return connection

    @property
    def usable(self) -> bool:
        return self.transport is not None and self._answer is None and not self.transport.is_closing()

    def send(self, data: bytes) -> tuple[Answer, "asyncio.Future[Answer]"]:
        """Send one request; returns the answer so far, and a future for the complete one."""
        assert self.usable and self.transport is not None
        self._head, self._body, self._events = b"", None, None
        self._answer = Answer(clock())
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._answer, self._done

    def abort(self, why: str = "aborted") -> None:
        """Abort the request and the connection."""
        if self.transport is not None:
            self.transport.abort()
        self._finish(why)

    # ------------------------------------------------------------------------------------------------ asyncio's side
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        whole = self._body is not None and self._body._left is None and not self._body._chunked
        self._finish("" if whole else "the connection was lost")

    def data_received(self, data: bytes) -> None:
        now, answer = clock(), self._answer
        if answer is None:
            return
        if self._body is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = self._head[end + 4 :]
            self._read_head(answer, self._head[:end])
        assert self._body is not None
        try:
            payload = self._body.feed(data)
        except ValueError:
            self.abort("a chunk's length is no number")
            return
        if self._events is None:
            answer.body += payload
        elif payload:
            for event in self._events.feed(payload):
                self._take(answer, event, now)
        if self._body.done:
            self._finish("")

    def _read_head(self, answer: Answer, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        answer.status = int(first.split()[1])
        length = fields.get(b"content-length")
        self._body = Body(b"chunked" in fields.get(b"transfer-encoding", b"").lower(), None if length is None else int(length))
        self._keep = fields.get(b"connection", b"").lower() != b"close"
        if fields.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._events = Events()

    def _take(self, answer: Answer, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            answer.error = f"an event cannot be read: {error}"
            return
        if event.error is not None:
            answer.error = json.dumps(event.error)[:300]
        if event.usage is not None:
            answer.prompt_tokens = event.usage.prompt_tokens
            answer.output_tokens = event.usage.completion_tokens or 0
            if event.usage.prompt_tokens_details is not None:
                answer.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        has_text = ends = False
        for choice in event.choices:
            has_text = has_text or choice.has_text
            ends = ends or choice.finish_reason is not None
            answer.token_ids += choice.token_ids or ()
            if answer.texts is not None:
                answer.texts.append(choice.piece)
            answer.finished += choice.finish_reason is not None
        if not has_text and not ends:
            return
        answer.end = now
        if not answer.first:
            answer.first = answer.last = now
        elif has_text:
            answer.gaps.append(now - answer.last)
            answer.last = now
        if answer.on_chunk is not None:
            answer.on_chunk()

    def _finish(self, why: str) -> None:
        answer, done, self._answer = self._answer, self._done, None
        if answer is None or done is None:
            return
        if not why and answer.status != 200:
            why = f"{answer.status}: {answer.body[:300].decode(errors='replace')}"
        answer.error = answer.error or why
        if not self._keep and self.transport is not None:
            self.transport.close()
        if not done.done():
            done.set_result(answer)


class Connections:
    """Connections to one server, each reused after its answer has ended."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []

    async def open(self) -> None:
        """Open another connection, for a later request. Raises OSError."""
        self._idle.append(await Connection.open(self._target))

    async def ask(self, data: bytes, timeout_s: float, *, keep_texts: bool = False, is_whole: bool = False) -> Answer:
        """The answer to a request (Target.request); a failure is in its `error`. is_whole: the answer is no stream: its `body`
        has come when the request ends."""
        answer, connection = Answer(clock()), None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                answer, done = connection.send(data)
                answer.texts = [] if keep_texts else None
                await done
                if is_whole:
                    answer.first = answer.end = clock()
        except TimeoutError:
            answer.error = f"no end after {timeout_s:g} s"
        except OSError as error:
            answer.error = f"cannot connect: {error}"
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            raise
        if connection is not None:
            if answer.error:
                connection.abort()
            elif connection.usable:
                self._idle.append(connection)
        if not answer.error and not answer.first:
            answer.error = "the answer held nothing"
        return answer

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await Connection.open(self._target)

    def abort(self) -> None:
        for connection in self._idle:
            connection.abort()


async def ask(target: Target, data: bytes, timeout_s: float = 60.0) -> Answer:
    """One request on a connection of its own. A failure is in the answer's `error`."""
    try:
        async with asyncio.timeout(timeout_s):
            connection = await Connection.open(target)
            _, done = connection.send(data)
            try:
                return await done
            finally:
                connection.abort()
    except (OSError, TimeoutError) as error:
        failed = Answer(clock())
        failed.error = f"{type(error).__name__}: {error}"
        return failed
