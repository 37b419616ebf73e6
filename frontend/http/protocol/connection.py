"""HTTP/1.1 on asyncio: bytes in, bytes out. One `Connection` per socket; routes are not known here.

State is grouped by lifetime: process (server_state.py), connection (`Connection`), the message being read (reader.py), request
and response (exchange.py). Requests of one connection are answered in order, one at a time. Back-pressure both ways: reading
pauses when a client sends far ahead of its answers; no answer begins, and no stream goes on, while the client does not read.
Every state has a deadline, which `check_deadlines` enforces. Tests feed bytes to `data_received`.
"""

import asyncio
import logging
from typing import cast

from quire.frontend.http.protocol.errors import ApiError, internal_error, shutting_down
from quire.frontend.http.protocol.exchange import Request, Response, ResponseState
from quire.frontend.http.protocol.reader import RequestReader
from quire.frontend.http.server_state import ServerState

logger = logging.getLogger("quire.http")

_READ_AHEAD = 64 << 10  # bytes that may arrive beyond the request being answered before reading pauses
_DISCARD_BYTES = 64 << 20  # of unwanted input that are read, so that the client sees our answer and not a reset; and
_LINGER_S = 5.0  # how long we wait for it


class Connection(asyncio.Protocol):
    """One client connection, from `connection_made` to `connection_lost`."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # reading
        self._reader = RequestReader(server)
        self._read_ahead = 0
        self._read_paused = False
        self._idle_deadline: float | None = None  # of a connection without a request, or of one in `_close`
        # answering
        self._task: asyncio.Task[None] | None = None
        # writing
        self._gone = False
        self._closing = False  # the last response is written
        self._discarded_bytes = 0
        self._write_paused = False
        self._write_deadline: float | None = None
        self._drained: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------ asyncio: the connection
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._reader.peer = transport.get_extra_info("peername")
        has_room = self._server.add(self)
        self._idle_deadline = self._server.clock() + self._limits.keep_alive_timeout_s
        if self._server.closing:
            self._refuse(shutting_down())
        elif not has_room:
            self._transport.abort()  # too many even for an error answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_gone()
        self._reader.drop()
        self._server.forget(self)

    def eof_received(self) -> bool:
        """A client that closes its sending side is taken to be gone: many clients cancel an answer this way."""
        self._client_gone()
        return False  # the transport closes itself

    def _client_gone(self) -> None:
        self._gone = True
        self._reader.end()
        if self._task is not None:
            self._task.cancel()

    @property
    def held_bytes(self) -> int:
        return self._reader.held_bytes

    # --------------------------------------------------------------------------------------------------------- reading
    def data_received(self, data: bytes) -> None:
        if self._reader.ended:
            self._discard(len(data))
            return
        self._reader.feed(data)
        if self._reader.queue and self._server.works(self):
            self._reader.has_place = True
        if self._reader.is_reading or self._reader.queue:
            self._idle_deadline = None
        if self._task is not None:
            self._read_ahead += len(data)
            if self._read_ahead > _READ_AHEAD:
                self._pause_reading()
        self._advance()

    def _refuse(self, error: ApiError) -> None:
        self._reader.refuse(error)
        self._advance()

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self._reader.deadline = None  # the client waits for us now
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._read_ahead = 0
        if self._reader.ended:
            return
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
            self._reader.restart_deadline()
        if not self._reader.queue:
            self._server.rests(self)
            self._reader.has_place = False
            if not self._reader.is_reading:
                self._idle_deadline = self._server.clock() + self._limits.keep_alive_timeout_s

    def _discard(self, num_bytes: int) -> None:
        self._discarded_bytes += num_bytes
        if self._discarded_bytes > _DISCARD_BYTES:
            self._pause_reading()

    # ------------------------------------------------------------------------------------------------------- answering
    def _advance(self) -> None:
        """Start the next request, if it has arrived in full, the last one is answered and the client reads what we write."""
        queue = self._reader.queue
        if self._task is not None or not queue or self._write_paused or self._closing or self._gone:
            return
        request = queue[0]
        if request.complete or request.refusal is not None:
            self._reader.take()
            response = Response(request, self)
            if request.refusal is not None:
                response.send_error(request.refusal)
                self._answered(response)
            else:
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
        except BaseException:  # a bug of ours, a panic in Rust too, fails only this request, and is logged
            logger.exception("%s %s failed", request.method, request.path.decode("latin-1"))
            self._fail_response(response, internal_error())
        finally:
            self._task = None
        if not self._gone:
            if response.state is not ResponseState.DONE:
                self._fail_response(response, internal_error())
            self._answered(response)

    def _fail_response(self, response: Response, error: ApiError) -> None:
        """Send the error if nothing was sent yet; otherwise end the stream without its last chunk, which shows the failure."""
        if response.state is ResponseState.WAITING:
            response.send_error(error)
        elif response.state is ResponseState.STREAMING:
            response.close = True
            response.state = ResponseState.DONE

    def _answered(self, response: Response) -> None:
        if response.close or self.is_last():
            self._close()
            return
        self._resume_reading()
        self._loop.call_soon(self._advance)  # a direct call would recurse deeply for a long pipeline

    def _close(self) -> None:
        """Close once everything is written. With unread input, a close would become a reset, and the client might never see the
        answer: so end our side of the connection, and discard what still arrives for _LINGER_S."""
        self._closing = True
        now = self._server.clock()
        if self._reader.refused and self._transport.can_write_eof():
            self._transport.write_eof()
            self._idle_deadline = now + _LINGER_S
            self._server.rests(self)
        else:
            self._transport.close()
            self._idle_deadline = None
            self._write_deadline = now + self._limits.write_timeout_s

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
        return self._server.closing and not self._reader.queue

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
        elif self._reader.deadline is not None and now >= self._reader.deadline:
            self._refuse(ApiError(408, "The request did not arrive in time.", code="request_timeout"))
        elif self._idle_deadline is not None and now >= self._idle_deadline:
            self._idle_deadline = None
            if self._closing:
                self._transport.close()
                self._write_deadline = now + self._limits.write_timeout_s
            else:
                self.close_if_idle()

    def make_room(self) -> None:
        """End a connection without a request for a new one."""
        self._reader.end()
        self.abort()

    def close_if_idle(self) -> None:
        """End a connection that is neither being answered nor sending a request."""
        if self._task is None and not self._reader.queue and not self._reader.is_reading and not self._closing:
            self._reader.end()
            self._close()

    def cancel(self) -> None:
        """Cancel the answer in progress; the client gets an error if nothing was sent yet."""
        self._reader.drop()
        if self._task is not None:
            self._task.cancel()
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()
