"""HTTP/1.1 on asyncio: bytes in, bytes out. One `Connection` per socket; no route is known here.

State is grouped by lifetime: process (shared.py), connection (`Connection`), message being read (`_Incoming`), request and
response (exchange.py). llhttp refuses malformed and smuggling shapes; what it lets pass and we do not is in head.py.
Requests of one connection are answered in order. Nothing here grows without a limit: head, header count, body, bytes read
ahead, pipelined requests, bodies held by all connections together, connections. Tests feed bytes to `data_received`.
"""

import asyncio
import logging
from collections import deque
from typing import cast

import httptools

from quire.frontend.http.errors import ApiError, internal_error, shutting_down
from quire.frontend.http.exchange import Request, Response, State
from quire.frontend.http.head import BAD_REQUEST, body_too_large, check_head, check_length, has_body, head_too_large
from quire.frontend.http.shared import Server

logger = logging.getLogger("quire.http")

_SINGLE = frozenset((b"host", b"authorization", b"content-type", b"content-encoding", b"expect", b"transfer-encoding"))
_READ_AHEAD = 64 << 10  # bytes that may arrive beyond the request being answered before reading pauses
_DISCARD_BYTES = 4 << 20  # of input that nobody wants, so that the client sees our answer and not a reset; and
_LINGER_S = 2.0  # how long we wait for it


class _Incoming:
    """The message being read."""

    __slots__ = ("head_bytes", "head_complete", "num_headers", "request", "unseen_bytes")

    def __init__(self) -> None:
        self.request = Request()
        self.head_complete = False
        self.head_bytes = 0  # of names, values and target, as the parser hands them out
        self.num_headers = 0
        self.unseen_bytes = 0  # fed since the parser last handed out anything: part of one unfinished token


class Connection(asyncio.Protocol):
    """One client connection. asyncio calls the protocol methods, httptools the `on_*` ones, from inside `feed_data`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser = httptools.HttpRequestParser(self)
        # reading
        self._incoming: _Incoming | None = None
        self._repeating_head = False  # see _parse
        self._fault: ApiError | None = None  # the first thing wrong with the message being read
        self._reading_ended = False  # what still arrives is not for us: after a fault or a "Connection: close"
        self._read_ahead = 0
        self._read_paused = False
        self._read_deadline: float | None = None
        # answering
        self._pipeline: deque[Request] = deque()  # heads complete, not yet being answered; only the last may lack its body
        self._task: asyncio.Task[None] | None = None
        self.held_bytes = 0
        # writing
        self._gone = False
        self._closing = False  # the last response is written
        self._lingering = False  # close in two steps: the client may still be sending
        self._discarded_bytes = 0
        self._write_paused = False
        self._write_deadline: float | None = None
        self._drained: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------ asyncio: the connection
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._read_deadline = self._server.clock() + self._limits.keep_alive_timeout_s
        if self._server.closing:
            self._refuse(shutting_down())
        elif len(self._server.connections) > 2 * self._limits.max_connections:
            self._transport.abort()  # too many even to be told so
        elif len(self._server.connections) > self._limits.max_connections:
            self._refuse(ApiError(503, "Too many connections.", code="too_many_connections", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_gone()
        self._pipeline.clear()
        self._release(self.held_bytes)
        self._server.forget(self)

    def eof_received(self) -> bool:
        """A client that closes its sending side is taken to be gone: that is how one stops an answer it no longer wants."""
        self._client_gone()
        return False  # the transport closes itself

    def _client_gone(self) -> None:
        self._gone = True
        self._reading_ended = True
        if self._task is not None:
            self._task.cancel()

    # --------------------------------------------------------------------------------------------------------- reading
    def data_received(self, data: bytes) -> None:
        if self._reading_ended:
            self._discard(len(data))
            return
        if self._incoming is not None:
            self._incoming.unseen_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._fail(ApiError(400, BAD_REQUEST, code="bad_request"))
        incoming = self._incoming
        if incoming is not None and incoming.unseen_bytes + incoming.head_bytes > self._limits.max_head_bytes:
            self._fail(head_too_large())
        if self._fault is not None:
            self._refuse(self._fault)
        if self._task is not None:
            self._read_ahead += len(data)
            if self._read_ahead > _READ_AHEAD and not self._read_paused:
                self._read_paused = True
                self._read_deadline = None  # it is us who make the client wait
                self._transport.pause_reading()
        self._advance()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It stops at the head of a request that offers an upgrade ("h2c": Java's client does, on every POST),
        and would leave the body unread. We decline by answering in HTTP/1.1: a new parser, fed a head of the same framing
        without the offer, reads the body and what comes after."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if self._incoming is None:
                return
            headers = self._incoming.request.headers
            framing = [b"%b: %b\r\n" % (n, headers[n]) for n in (b"content-length", b"transfer-encoding") if n in headers]
            self._parser = httptools.HttpRequestParser(self)
            self._repeating_head = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n" % b"".join(framing))
            self._repeating_head = False

    def on_message_begin(self) -> None:
        if self._repeating_head or self._fault is not None or self._reading_ended:
            return
        self._incoming = _Incoming()
        self._read_deadline = self._server.clock() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        if self._incoming is not None and self._fault is None and not self._repeating_head:
            self._incoming.unseen_bytes = 0
            self._incoming.request.target += url
            self._incoming.head_bytes += len(url)
            if len(self._incoming.request.target) > self._limits.max_target_bytes:
                self._fail(ApiError(414, "The request's target is too long.", code="target_too_long"))

    def on_header(self, name: bytes, value: bytes | None) -> None:
        incoming = self._incoming
        if incoming is None or self._fault is not None or self._repeating_head:
            return
        value = value or b""
        incoming.unseen_bytes = 0
        incoming.head_bytes += len(name) + len(value) + 4
        incoming.num_headers += 1
        if incoming.num_headers > self._limits.max_headers or incoming.head_bytes > self._limits.max_head_bytes:
            self._fail(head_too_large())
        elif not incoming.head_complete:  # trailers are counted and dropped
            name = name.lower()
            if name in _SINGLE and name in incoming.request.headers:
                self._fail(ApiError(400, f"The header {name.decode()} may be given only once.", code="bad_request"))
            incoming.request.headers[name] = value

    def on_headers_complete(self) -> None:
        incoming = self._incoming
        if incoming is None or self._fault is not None or self._repeating_head:
            return
        incoming.unseen_bytes = incoming.head_bytes = incoming.num_headers = 0
        incoming.head_complete = True
        request = incoming.request
        request.method = self._parser.get_method().decode()
        request.version = self._parser.get_http_version()
        request.path, _, request.query = request.target.partition(b"?")
        request.keep_alive = self._parser.should_keep_alive() and not self._server.closing
        request.max_body = self._limits.max_body_bytes
        fault = check_head(request)
        if fault is None and len(self._pipeline) >= self._limits.max_pipelined:
            fault = ApiError(400, "Too many pipelined requests.", code="too_many_requests")
        error = fault or self._server.app.admit(request) or check_length(request)
        if fault is not None or (error is not None and has_body(request)):
            self._fail(error)  # a body that is not read: the connection ends with the answer
            return
        request.refusal = error
        self._pipeline.append(request)
        self._read_deadline = self._server.clock() + self._limits.body_timeout_s

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        if incoming is None or self._fault is not None:
            return
        incoming.unseen_bytes = 0
        request = incoming.request
        if len(request.body) + len(body) > request.max_body:
            self._fail(body_too_large(request.max_body))
        elif self._server.held_bytes + len(body) > self._limits.max_held_bytes:
            self._fail(ApiError(503, "Too many request bodies in memory.", code="overloaded", retry_after_s=1))
        else:
            request.body += body
            self.held_bytes += len(body)
            self._server.held_bytes += len(body)

    def on_chunk_header(self) -> None:
        if self._incoming is not None:
            self._incoming.unseen_bytes = 0

    def on_message_complete(self) -> None:
        if self._incoming is None or self._fault is not None or self._parser.should_upgrade():
            return
        request = self._incoming.request
        request.complete = True
        self._incoming = None
        self._read_deadline = None
        if not request.keep_alive:
            self._end_reading()

    def _fail(self, error: ApiError | None) -> None:
        """The message being read cannot be served; the first fault counts. Raising through the parser would gain nothing."""
        if self._fault is None and not self._reading_ended:
            self._fault = error

    def _refuse(self, error: ApiError) -> None:
        """Queue an error as the last response of this connection, in its turn after the requests before it."""
        request = self._incoming.request if self._incoming is not None else Request()
        self._release(len(request.body))
        request.body.clear()
        request.refusal = error
        request.keep_alive = False
        if not self._pipeline or self._pipeline[-1] is not request:
            self._pipeline.append(request)
        self._end_reading()
        self._lingering = True
        self._advance()

    def _end_reading(self) -> None:
        self._reading_ended = True
        self._incoming = None
        self._read_deadline = None
        if self._pipeline:
            self._pipeline[-1].keep_alive = False

    def _discard(self, num_bytes: int) -> None:
        self._discarded_bytes += num_bytes
        if self._discarded_bytes > _DISCARD_BYTES and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    # ------------------------------------------------------------------------------------------------------- answering
    def _advance(self) -> None:
        """Start the next request, if it has arrived in full, the last one is answered and the client takes what we write."""
        if self._task is not None or not self._pipeline or self._write_paused or self._closing or self._gone:
            return
        request = self._pipeline[0]
        if request.complete or request.refusal is not None:
            self._pipeline.popleft()
            response = Response(request, self)
            if request.refusal is not None:
                response.send_error(request.refusal)
                self._answered(response)
            else:
                self._release(len(request.body))  # from here on the handler's
                self._task = self._loop.create_task(self._answer(request, response))
        elif request.expects_continue:
            request.expects_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _answer(self, request: Request, response: Response) -> None:
        try:
            await self._server.app.handle(request, response)
        except ApiError as error:
            self._fail_response(response, error)
        except asyncio.CancelledError:
            if not self._gone:
                self._fail_response(response, shutting_down())
        except Exception:
            logger.exception("%s %s failed", request.method, request.path.decode("latin-1"))
            self._fail_response(response, internal_error())
        finally:
            self._task = None
        if not self._gone:
            if response.state is not State.DONE:
                self._fail_response(response, internal_error())
            self._answered(response)

    def _fail_response(self, response: Response, error: ApiError) -> None:
        """An error where it still can be told; a stream that breaks off ends without its last chunk, so that it shows."""
        if response.state is State.WAITING:
            response.send_error(error)
        elif response.state is State.STREAMING:
            response.close = True
            response.state = State.DONE

    def _answered(self, response: Response) -> None:
        if response.close or (self._server.closing and not self._pipeline):
            self._close()
            return
        self._read_ahead = 0
        if not self._reading_ended:
            self._resume_reading()
        self._loop.call_soon(self._advance)  # not a call: a long pipeline would be a deep recursion

    def _resume_reading(self) -> None:
        """The client may send again, so its time counts again."""
        now = self._server.clock()
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
            if self._incoming is not None:
                head_complete = self._incoming.head_complete
                self._read_deadline = now + (self._limits.body_timeout_s if head_complete else self._limits.head_timeout_s)
        if not self._pipeline and self._incoming is None:
            self._read_deadline = now + self._limits.keep_alive_timeout_s

    def _close(self) -> None:
        """Close once everything is written. Unread input would turn a close into a reset, and the client might never see
        the answer: so say that we are done, and throw away what still comes, for a moment."""
        self._closing = True
        now = self._server.clock()
        if self._lingering and self._transport.can_write_eof():
            self._transport.write_eof()
            self._read_deadline = now + _LINGER_S
        else:
            self._transport.close()
            self._read_deadline = None
            self._write_deadline = now + self._limits.write_timeout_s

    def _release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self._server.held_bytes -= num_bytes

    # --------------------------------------------------------------------------------------------------------- writing
    def write(self, data: bytes) -> None:
        if not self._gone and data:
            self._transport.write(data)

    @property
    def write_paused(self) -> bool:
        return self._write_paused

    async def drain(self) -> None:
        while self._write_paused and not self._gone:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def date(self) -> bytes:
        return self._server.date

    def is_last(self) -> bool:
        return self._server.closing and not self._pipeline

    def is_gone(self) -> bool:
        return self._gone

    def pause_writing(self) -> None:
        self._write_paused = True
        self._write_deadline = self._server.clock() + self._limits.write_timeout_s

    def resume_writing(self) -> None:
        self._write_paused = False
        if not self._closing:
            self._write_deadline = None
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        self._advance()

    # ------------------------------------------------------------------------------------------- deadlines and the end
    def check_deadlines(self, now: float) -> None:
        if self._write_deadline is not None and now >= self._write_deadline:
            self.abort()
        elif self._read_deadline is not None and now >= self._read_deadline:
            self._read_deadline = None
            if self._closing:
                self._transport.close()
                self._write_deadline = now + self._limits.write_timeout_s
            elif self._incoming is not None:
                self._refuse(ApiError(408, "The request did not arrive in time.", code="request_timeout"))
            elif self._task is None and not self._pipeline:
                self._end_reading()
                self._close()

    def close_if_idle(self) -> None:
        """The server stops: end a connection that is neither being answered nor sending a request."""
        if self._task is None and not self._pipeline and self._incoming is None and not self._closing:
            self._end_reading()
            self._close()

    def cancel(self) -> None:
        """End the answer in progress; the client is told if it still can be."""
        self._pipeline.clear()
        if self._task is not None:
            self._task.cancel()
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()
