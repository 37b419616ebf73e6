"""One request and its response: the state that lives from a request's first header to its response's last byte.

The parser fills a `Request`. `Response` is an explicit state machine, WAITING -> (STREAMING ->) DONE, that turns calls into
bytes; a call in the wrong state is a bug of the caller and raises RuntimeError. Neither knows any route. Bytes for a client
that has gone are dropped silently: the connection has cancelled the handler already.
"""

import enum
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from quire.frontend.http.protocol.errors import ApiError

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

_PHRASES = {**{s.value: s.phrase for s in HTTPStatus}, 529: "Overloaded"}  # 529 is Anthropic's own
_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\nserver: quire\r\n".encode() for status, phrase in _PHRASES.items()}

Headers = Iterable[tuple[bytes, bytes]]


class Request:
    """A request as parsed: `headers` have lower-case names; `body` is complete when a handler sees it."""

    __slots__ = (
        "adapter",
        "answer_headers",
        "body",
        "complete",
        "cut_out",
        "error_as",
        "expects_continue",
        "headers",
        "is_admin",
        "is_open",
        "is_patient",
        "keep_alive",
        "max_body",
        "method",
        "owner",
        "path",
        "path_parameters",
        "peer",
        "query",
        "refusal",
        "route",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.path = b""  # raw, up to "?", without the root path; not decoded, so that one spelling names one route
        self.query = b""
        self.version = "1.1"
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = True
        self.expects_continue = False
        self.max_body = 0
        self.body = bytearray()
        self.complete = False
        self.peer: object = None  # the client's address, as the transport names it
        self.refusal: ApiError | None = None  # an error decided before the body was read
        # set by the application's `admit`
        self.route: object = None
        self.is_open = False  # it is a probe's: answered even while there are too many connections
        self.owner = ""  # a digest of its API key: the owner of the records that it makes and may see
        self.is_patient = False  # a line of a batch: it waits for the engine for as long as it takes
        self.is_admin = True  # it has an admin key, or none is needed
        self.adapter: Any = None  # ipc/adapters.AdapterUse of the model that it names; None: the model itself
        self.path_parameters: dict[str, str] = {}
        self.error_as: Callable[[ApiError], ApiError] | None = None  # turns errors into another shape than OpenAI's
        self.answer_headers = b""  # header lines for any answer
        self.cut_out: dict[str, memoryview] = {}  # long strings of the body, by what stands in their place

    def take_body(self) -> bytearray:
        """The body, which the request keeps no longer: it is not needed once decoded, and an answer may take minutes."""
        body, self.body = self.body, bytearray()
        return body


class ResponseState(enum.Enum):
    WAITING = "waiting"  # nothing sent
    STREAMING = "streaming"  # head sent, body of unknown length
    DONE = "done"


class Output(Protocol):
    """The connection, as a response sees it."""

    @property
    def write_paused(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def date(self) -> bytes: ...
    def is_last(self) -> bool: ...  # the server is stopping: announce the end of the connection
    def is_gone(self) -> bool: ...


class Response:
    """The answer to one request, written through `output`."""

    __slots__ = ("_chunked", "_output", "_request", "close", "is_sized", "state", "status")

    def __init__(self, request: Request, output: Output) -> None:
        self._request = request
        self._output = output
        self._chunked = False
        self.is_sized = False  # begun with start_sized: only the announced body can follow
        self.state = ResponseState.WAITING
        self.status = 0
        self.close = not request.keep_alive  # the connection ends with this response

    def send(self, status: int, body: bytes = b"", content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send the whole response at once. For HEAD and 304 only the head is sent, with the body's length."""
        self._expect(ResponseState.WAITING)
        head = self._head(status, headers, b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)))
        self._output.write(head if self._request.method == "HEAD" or status == 304 else head + body)
        self.state = ResponseState.DONE

    def send_error(self, error: ApiError) -> None:
        error = self.error_for_client(error)
        self.send(error.status, error.body(), headers=error.headers())

    def error_for_client(self, error: ApiError) -> ApiError:
        """The error in the shape that this request's API uses."""
        return error if self._request.error_as is None else self._request.error_as(error)

    def start(self, content_type: bytes = EVENT_STREAM, first: bytes = b"") -> None:
        """Begin a streamed body, with its first bytes in the same write as the head."""
        self._expect(ResponseState.WAITING)
        self._chunked = self._request.version == "1.1"
        if not self._chunked:
            self.close = True  # in HTTP/1.0, such a body ends with the connection
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        head = self._head(200, (), b"content-type: %b\r\ncache-control: no-cache\r\n%b" % (content_type, framing))
        self.state = ResponseState.STREAMING
        self._output.write(head + self._frame(first) if first else head)

    def start_sized(self, num_bytes: int, content_type: bytes = JSON, headers: Headers = ()) -> bool:
        """Begin a body of this length, to be written in pieces. Returns False if the client wants no body."""
        self._expect(ResponseState.WAITING)
        framing = b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, num_bytes)
        self._output.write(self._head(200, headers, framing))
        wants_body = self._request.method != "HEAD"
        self.state, self.is_sized = (ResponseState.STREAMING if wants_body else ResponseState.DONE), True
        return wants_body

    def write(self, data: bytes) -> None:
        """Write a piece of a streamed body. b"" writes nothing, since an empty chunk would end a chunked body."""
        if self.state is not ResponseState.STREAMING:
            self._expect(ResponseState.STREAMING)
        if data:
            self._output.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, last: bytes = b"") -> None:
        """Finish a streamed body."""
        self._expect(ResponseState.STREAMING)
        tail = b"0\r\n\r\n" if self._chunked else b""
        self._output.write(self._frame(last) + tail if last else tail)
        self.state = ResponseState.DONE

    async def drain(self) -> None:
        """Wait while the client reads more slowly than we write."""
        if self.write_paused:
            await self._output.drain()

    @property
    def write_paused(self) -> bool:
        return self._output.write_paused

    @property
    def client_gone(self) -> bool:
        return self._output.is_gone()

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        self.status = status
        self.close = self.close or self._output.is_last()
        parts = [_STATUS_LINES[status], self._output.date(), framing, self._request.answer_headers]
        parts += [b"%b: %b\r\n" % pair for pair in headers]
        if self.close:
            parts.append(b"connection: close\r\n")
        elif self._request.version == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _expect(self, state: ResponseState) -> None:
        if self.state is not state:
            raise RuntimeError(f"response is {self.state.value}, not {state.value}")
