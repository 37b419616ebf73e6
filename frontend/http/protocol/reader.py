"""RequestReader: bytes of one connection in, requests out, on httptools (llhttp). It owns requests until they are taken.

llhttp refuses malformed requests and request smuggling; stricter rules are in head.py. Everything that grows has a limit:
target, head, header count, body, requests in the queue, bodies held by all connections together. The first error ends the
reading: `feed` puts it into the queue, as this connection's last answer, after the requests that came before. The reader knows
no transport: the connection pauses, answers and closes (connection.py).
"""

import logging
from collections import deque
from typing import cast

import httptools

from quire.frontend.http.protocol.errors import ApiError, internal_error
from quire.frontend.http.protocol.exchange import Request
from quire.frontend.http.protocol.head import (
    BAD_REQUEST,
    body_too_large,
    check_head,
    check_length,
    has_body,
    head_too_large,
    split_target,
)
from quire.frontend.http.server_state import ServerState

logger = logging.getLogger("quire.http")

_SINGLE = frozenset(
    (b"host", b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"expect", b"transfer-encoding")
)


class _Incoming:
    """The message being read."""

    __slots__ = ("head_bytes", "head_complete", "num_headers", "request", "unseen_bytes")

    def __init__(self) -> None:
        self.request = Request()
        self.head_complete = False
        self.head_bytes = 0  # of names, values and target, as the parser hands them out
        self.num_headers = 0
        self.unseen_bytes = 0  # fed since the parser's last callback: part of one unfinished token


class RequestReader:
    """queue: requests with complete heads, oldest first; only the last may still lack its body.

    ended: input that still arrives is ignored, after an error or a "Connection: close". refused: it ended with an error.
    deadline: by when the message being read must make progress; None while none is being read.
    """

    def __init__(self, server: ServerState) -> None:
        self.queue: deque[Request] = deque()
        self.ended = False
        self.refused = False
        self.deadline: float | None = None
        self.held_bytes = 0  # of bodies that no handler has taken yet
        self.peer: object = None  # the client's address
        self.has_place = False  # a request is in work, which is not among the reserved ones
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: _Incoming | None = None
        self._fault: ApiError | None = None  # the first thing wrong with the message being read
        self._repeating_head = False  # see _parse

    @property
    def is_reading(self) -> bool:
        """Whether a part of a message has arrived and the rest has not."""
        return self._incoming is not None

    def feed(self, data: bytes) -> None:
        if self._incoming is not None:
            self._incoming.unseen_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserCallbackError:  # a fault of ours, in one of the methods that the parser calls
            logger.exception("a request could not be read")
            self._fail(internal_error())
        except httptools.HttpParserError:
            self._fail(ApiError(400, BAD_REQUEST, code="bad_request"))
        incoming = self._incoming
        if incoming is not None and incoming.unseen_bytes + incoming.head_bytes > self._limits.max_head_bytes:
            self._fail(head_too_large())
        if self._fault is not None:
            self.refuse(self._fault)

    def take(self) -> Request:
        """Remove the oldest request, with its body; the caller answers it."""
        request = self.queue.popleft()
        self._release(request)
        return request

    def refuse(self, error: ApiError) -> None:
        """End the reading with an error as the last answer."""
        request = self._incoming.request if self._incoming is not None else Request()
        self._note_method(request)
        self._release(request)
        request.body.clear()
        request.refusal = error
        if not self.queue or self.queue[-1] is not request:
            self.queue.append(request)
        self.end()
        self.refused = True

    def end(self) -> None:
        """Read no further; the last request in the queue is the connection's last."""
        self.ended = True
        self._incoming = None
        self.deadline = None
        if self.queue:
            self.queue[-1].keep_alive = False

    def drop(self) -> None:
        """The connection is lost: forget everything."""
        self.end()
        for request in self.queue:
            self._release(request)
        self.queue.clear()
        self._parser = cast(httptools.HttpRequestParser, None)  # breaks a reference cycle

    def restart_deadline(self) -> None:
        """Start the client's time anew, after we have made it wait."""
        if self._incoming is not None:
            head_complete = self._incoming.head_complete
            self.deadline = self._body_deadline() if head_complete else self._server.clock() + self._limits.head_timeout_s

    def _body_deadline(self) -> float:
        """A route that accepts larger bodies gives them proportionally more time."""
        assert self._incoming is not None
        limits, most = self._limits, self._incoming.request.max_body
        factor = most / limits.max_body_bytes if most > limits.max_body_bytes else 1.0
        return self._server.clock() + limits.body_timeout_s * factor

    def _release(self, request: Request) -> None:
        self.held_bytes -= len(request.body)
        self._server.hold(request.owner, -len(request.body))

    def _fail(self, error: ApiError) -> None:
        """The message being read cannot be served; the first error counts. Raising through the parser would gain nothing."""
        if self._fault is None and not self.ended:
            self._fault = error
            if self._incoming is not None:
                self._note_method(self._incoming.request)  # now, as the parser goes on to the next message

    def _note_method(self, request: Request) -> None:
        """Keep the method also for errors: the answer to HEAD has no body."""
        request.method = request.method or self._parser.get_method().decode()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It stops after the head of a request that offers an upgrade ("h2c", as Java's client does on every
        POST) and leaves the body unread. We decline by answering in HTTP/1.1: a new parser, fed a head of the same framing
        without the offer, reads the body and everything after it."""
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

    # ------------------------------------------------------------------------- httptools, from inside `feed_data`
    def on_message_begin(self) -> None:
        if not self._repeating_head and self._fault is None and not self.ended:
            self._incoming = _Incoming()
            self.deadline = self._server.clock() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        incoming = self._reading()
        if incoming is None or self._repeating_head:
            return
        incoming.head_bytes += len(url)
        incoming.request.target += url
        if len(incoming.request.target) > self._limits.max_target_bytes:
            self._fail(ApiError(414, "The request's target is too long.", code="target_too_long"))

    def on_header(self, name: bytes, value: bytes | None) -> None:
        incoming = self._reading()
        if incoming is None or self._repeating_head:
            return
        value = value or b""
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
        incoming = self._reading()
        if incoming is None or self._repeating_head:
            return
        incoming.head_bytes = incoming.num_headers = 0
        incoming.head_complete = True
        request = incoming.request
        request.method = self._parser.get_method().decode()
        request.version = self._parser.get_http_version()
        request.path, request.query = split_target(request.target)
        request.keep_alive = self._parser.should_keep_alive() and not self._server.closing
        request.max_body = self._limits.max_body_bytes
        fault = check_head(request)
        if fault is None and len(self.queue) >= self._limits.max_pipelined:
            fault = ApiError(400, "Too many pipelined requests.", code="too_many_requests")
        request.peer = self.peer
        error = fault or self._server.app.admit(request) or check_length(request) or self._too_many(request)
        if error is not None and (fault is not None or has_body(request)):
            self._fail(error)  # a body that is not read: the connection ends with the answer
            return
        request.refusal = error
        self.queue.append(request)
        self.deadline = self._body_deadline()

    def _too_many(self, request: Request) -> ApiError | None:
        """While every connection has a request, the open routes are served by a reserve."""
        if request.is_open or self.has_place or not self._server.is_full:
            return None
        return ApiError(503, "Too many connections.", code="too_many_connections", retry_after_s=1)

    def on_chunk_header(self) -> None:
        self._reading()

    def on_body(self, body: bytes) -> None:
        incoming = self._reading()
        if incoming is None:
            return
        request = incoming.request
        if len(request.body) + len(body) > request.max_body:
            self._fail(body_too_large(request.max_body))
        elif not self._server.may_hold(request.owner, len(body)):
            self._fail(ApiError(503, "Too many request bodies in memory.", code="overloaded", retry_after_s=1))
        else:
            request.body += body
            self.held_bytes += len(body)
            self._server.hold(request.owner, len(body))

    def on_message_complete(self) -> None:
        incoming = self._reading()
        if incoming is None or self._parser.should_upgrade():
            return
        incoming.request.complete = True
        self._incoming = None
        self.deadline = None
        if not incoming.request.keep_alive:
            self.end()

    def _reading(self) -> _Incoming | None:
        """The message that a callback belongs to; None if the rest of it is to be ignored. Every callback calls this."""
        if self._incoming is None or self._fault is not None:
            return None
        self._incoming.unseen_bytes = 0
        return self._incoming
