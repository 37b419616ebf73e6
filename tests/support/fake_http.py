"""Fakes for HTTP: a transport that records bytes, a clock that tests move, an application that echoes, and parsed answers."""

import asyncio
from dataclasses import dataclass, field

from quire.frontend.http.protocol.connection import Connection
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.server_state import Limits, ServerState

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
)


class FakeTransport(asyncio.Transport):
    """Keeps what is written. `stall()` and `resume()` play the client that stops and starts to read."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.num_writes = 0
        self.written = asyncio.Event()
        self.closed = self.aborted = self.eof_sent = self.reading_paused = False
        self.protocol: Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.closed and not self.eof_sent, "written after the end"
        self.sent += data
        self.num_writes += 1
        self.written.set()

    def _lost(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def close(self) -> None:
        self._lost()

    def abort(self) -> None:
        self.aborted = True
        self._lost()

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_sent = True

    def pause_reading(self) -> None:
        assert not self.reading_paused
        self.reading_paused = True

    def resume_reading(self) -> None:
        assert self.reading_paused
        self.reading_paused = False


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = True


def parse_answers(raw: bytes, methods: str = "") -> list[Answer]:
    """Every response in raw, strictly. `methods` names the request methods in order where one is HEAD."""
    answers, rest, asked = [], bytes(raw), methods.split()
    while rest:
        head, separator, rest = rest.partition(b"\r\n\r\n")
        assert separator, head
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = status_line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(headers) == len(lines), "a header twice"
        answer = Answer(int(status), headers, b"")
        answers.append(answer)
        if answer.status == 100:
            assert not lines
        elif (asked and asked.pop(0) == "HEAD") or answer.status == 304:
            assert "content-length" in headers
        elif "content-length" in headers:
            size = int(headers["content-length"])
            answer.body, rest = rest[:size], rest[size:]
            answer.complete = len(answer.body) == size
        elif "transfer-encoding" in headers:
            rest = _parse_chunks(answer, rest)
        else:
            answer.body, rest = rest, b""
    return answers


def _parse_chunks(answer: Answer, rest: bytes) -> bytes:
    answer.complete = False
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        chunk, end, rest = rest[:n], rest[n : n + 2], rest[n + 2 :]
        assert end == b"\r\n"
        if n == 0:
            answer.complete = True
            break
        answer.chunks.append(chunk)
        answer.body += chunk
    return rest


async def settle(turns: int = 20) -> None:
    """Let everything that is ready to run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Wire:
    """A connection on a fake transport. Made inside a running loop."""

    def __init__(self, app, limits: Limits | None = None, server: ServerState | None = None) -> None:
        self.clock = FakeClock() if server is None else server.clock
        self.server = server or ServerState(app, limits, self.clock)
        self.transport = FakeTransport()
        self.connection = Connection(self.server)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def talk(self, data: bytes, methods: str = "") -> list[Answer]:
        """Feed data, let it be answered, return every answer so far."""
        self.feed(data)
        await settle()
        return self.answers(methods)

    def answers(self, methods: str = "") -> list[Answer]:
        self.server.check()
        return parse_answers(self.transport.sent, methods)

    async def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.sweep()
        await settle()


class EchoApp:
    """Answers with method, path and body. /refuse refuses at the head; /stream streams until told; /wait waits; /bug raises."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.handled: list[bytes] = []
        self.cancelled: list[bytes] = []

    def admit(self, request: Request) -> ApiError | None:
        request.is_open = request.path.endswith(b"live")
        if request.path == b"/small":
            request.max_body = 10
        if request.path == b"/bug/at/head":
            raise RuntimeError("secret detail")
        return ApiError(401, "No.") if request.path == b"/refuse" else None

    async def handle(self, request: Request, response: Response) -> None:
        self.handled.append(bytes(request.target))
        try:
            if request.path == b"/bug":
                raise RuntimeError("secret detail")
            if request.path == b"/error":
                raise ApiError(404, "Nothing here.", code="not_found")
            if request.path == b"/nothing":
                return
            if request.path.startswith(b"/wait"):
                await self.release.wait()
            if request.path in (b"/stream", b"/break"):
                response.start()
                response.write(b"one")
                await self.release.wait()
                response.write(b"two")
                if request.path == b"/break":
                    raise RuntimeError("secret detail")
                response.end()
                return
            response.send(200, b"%b %b %b" % (request.method.encode(), request.target, request.body), b"text/plain")
        except asyncio.CancelledError:
            self.cancelled.append(bytes(request.target))
            raise
