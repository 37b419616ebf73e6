"""CoreToFrontends: the core's end of its link to all frontends. A ZeroMQ ROUTER, driven by the core's loop, without a thread.

It owns the handshake, files, heartbeats, the epoch check and each frontend's outbox. It passes requests to the loop and never
raises, whatever a frontend sends. A frontend is named by its connection's identity, 16 random bytes. A slow frontend's outputs
wait, merged, in its outbox. A frontend is lost, and its requests must be aborted, in each of these cases:

    its connection is gone     every send detects it, and a Heartbeat is sent every half second
    it was silent for long
    its outbox is full         or all outboxes together are, and its own is the fullest

The reason for refusing a frontend is logged.
"""

import errno
import logging
import os
import time
from contextlib import suppress

import msgspec
import zmq

from quire.ipc.adapters import AdapterInfo
from quire.ipc.links import paths
from quire.ipc.links.curve import ZAP_DOMAIN, Authenticator, CoreKeys
from quire.ipc.links.limited_log import LimitedLog
from quire.ipc.links.media_frames import with_frames
from quire.ipc.links.outbox import FrontendConnection, PendingOutputs, Total
from quire.ipc.links.request_check import identify_request, may_travel_as_one, problem_with
from quire.ipc.links.sockets import readable
from quire.ipc.messages.frontend import (
    MAX_FRONTEND_MESSAGE,
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    CoreMessage,
    File,
    Finish,
    FrontendMessage,
    GetFile,
    Hello,
    Ping,
    Refused,
    RequestError,
    StepOutputs,
    Utility,
    Welcome,
)
from quire.ipc.messages.media import MediaGone
from quire.ipc.messages.message import DECODE_ERRORS, IDENTITY_BYTES
from quire.ipc.process.loop_clock import LoopClock

log = logging.getLogger("quire.enginecore")

MAX_FRONTENDS = 1024
# Messages per frontend. Further messages wait in its outbox, in which a hundred steps become one message.
_SEND_HWM = 128
_FULL_OUTBOXES = 8  # all outboxes together may hold as many bytes as this many full ones
_RECEIVE_HWM = 64
RECEIVE_BYTES = 1 << 20  # of requests and answers in one `receive`, so that large ones do not stop other streams
RECEIVE_S = 3e-3  # the same for small requests that take long to check: lists of bad words, 0.1 ms each

_SENT, _FULL, _GONE = range(3)  # outcomes of offering a message to the socket


def name_of(identity: bytes) -> str:
    """A frontend's name in logs."""
    return identity[-4:].hex()


class CoreToFrontends:
    """The core's link to its frontends; one thread. Call `receive` and `flush` in each turn of the loop, then `lost`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        epoch: int,
        welcome: Welcome | None = None,
        files: dict[str, bytes] | None = None,
        keys: CoreKeys | None = None,
        frontend_timeout_s: float = 30.0,
        outbox_bytes: int = 64 << 20,
        send_hwm: int = _SEND_HWM,
    ) -> None:
        """Bind. address: ipc:///absolute/path or tcp://host:port (port * picks one); None makes a private ipc address.

        Without a welcome, connections are accepted and kept waiting until `set_welcome`. Raises ValueError for an address that
        is malformed or not safe, FileExistsError if another process listens there, zmq.ZMQError if it cannot be bound.
        """
        self.epoch = epoch
        self._frontend_timeout_s = frontend_timeout_s
        self._outbox_bytes = outbox_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontendMessage)
        self._frontends: dict[bytes, FrontendConnection] = {}
        self._slow: dict[bytes, FrontendConnection] = {}  # with a nonempty outbox
        self._waiting = Total()
        self._lost: list[bytes] = []
        self._refusals = LimitedLog(log)
        self._receive_bytes = 0  # that this call of `receive` may still handle
        self._welcome = welcome
        self._files = files or {}
        self._directory: str | None = None
        self._socket_path: str | None = None  # at a path that other processes may use
        self._clock = LoopClock()  # does not count time in which this process itself stood still
        self._next_timeout_check = 1.0

        if address is not None:
            paths.check_listen_address(address, has_keys=keys is not None)
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, keys.allowed) if keys and paths.is_tcp(address) else None
        self._router = self._make_router(address, send_hwm)
        if self._authenticator is not None:
            assert keys is not None
            self._router.set(zmq.CURVE_SERVER, 1)
            self._router.set(zmq.CURVE_SECRETKEY, keys.own.secret)
            self._router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            self.address = self._bind(address)
        except BaseException:  # Ctrl-C, too: leave no socket and no folder behind
            self.close()
            raise

    def _make_router(self, address: str | None, send_hwm: int) -> zmq.Socket:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, send_hwm)
        router.set(zmq.RCVHWM, _RECEIVE_HWM)
        router.set(zmq.MAXMSGSIZE, MAX_FRONTEND_MESSAGE)
        router.set(zmq.LINGER, 0)
        router.set(zmq.IPV6, int("[" in (address or "")))
        return router

    def _bind(self, address: str | None) -> str:
        if address is None:
            self._directory = paths.private_directory()
            self._router.bind(f"ipc://{self._directory}/core")
        elif (path := paths.socket_path(address)) is not None:
            with paths.claim_socket_path(path):
                self._router.bind(address)
                self._socket_path = path
                os.chmod(path, 0o600)
        else:
            self._router.bind(address)
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def sockets(self) -> list[zmq.Socket]:
        """For a zmq.Poller, with POLLIN; call `receive` when any is ready."""
        return [self._router] if self._authenticator is None else [self._router, self._authenticator.socket]

    def set_welcome(self, welcome: Welcome, files: dict[str, bytes]) -> None:
        """Set the Welcome and the complete list of files that frontends may get, and welcome those that wait."""
        self._welcome, self._files = welcome, files
        for frontend in list(self._frontends.values()):
            if not frontend.welcomed:
                self._greet(frontend)

    def set_adapters(self, adapters: list[AdapterInfo]) -> None:
        """Set what frontends are told that are welcomed from now on."""
        self._welcome = self._welcome and msgspec.structs.replace(self._welcome, adapters=adapters)

    @property
    def frontends(self) -> list[bytes]:
        """Identities of the connections that have been welcomed."""
        return [f.identity for f in self._frontends.values() if f.welcomed]

    # ------------------------------------------------------------------------------------------------- receiving
    def receive(self, limit: int = 256) -> list[tuple[bytes, FrontendMessage]]:
        """Requests that have arrived: (identity, AddRequest | Abort | Finish | Utility). It reads about `limit` messages, fewer
        if they are large or take long. Requests that were sent together (FrontendToCore.hold) are returned together.

        Other messages are handled here. Does not wait. If more than `limit` messages wait, the poller reports them again.
        """
        if self._authenticator is not None:
            self._authenticator.answer()
        self._clock.tick()
        requests: list[tuple[bytes, FrontendMessage]] = []
        router = self._router
        self._receive_bytes = RECEIVE_BYTES
        until = time.monotonic() + RECEIVE_S
        while limit > 0 and self._receive_bytes > 0 and readable(router):
            identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            limit -= max(len(frames), 1)
            size = sum(map(len, frames))
            self._receive_bytes -= size
            if (media := with_frames(frames)) is not None:
                requests += [(identity, media)] * self._is_welcome(identity, self._frontends.get(identity), media.epoch)
                continue
            if not may_travel_as_one(frames, size) or len(identity) != IDENTITY_BYTES:
                self._refuse(identity, "malformed message")
                continue
            for frame in frames:
                message = self._accept(identity, frame)
                if message is not None:
                    requests.append((identity, message))
                elif identity not in self._frontends:
                    break  # it was refused: ignore the rest
            if time.monotonic() >= until:
                break
        return requests

    def _accept(self, identity: bytes, frame: bytes) -> FrontendMessage | None:
        """Decode one message. Return it if it is a request of a known frontend; otherwise handle it and return None."""
        try:
            message = self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            self._reject(identity, frame, error)
            return None
        frontend = self._frontends.get(identity)
        if frontend is not None:
            frontend.heard_at = self._clock.now
        match message:
            case Hello():
                self._hello(identity, message)
            case Ping(epoch=0) if frontend is not None:
                pass  # it waits for its Welcome
            case _ if not self._is_welcome(identity, frontend, message.epoch):
                pass
            case GetFile():
                assert frontend is not None
                self._send_file(frontend, message.name)
            case AddRequest() if (problem := problem_with(message)) is not None:
                self.send(identity, RequestError(self.epoch, message.id, "invalid", problem))
            case AddRequest() | Abort() | Finish() | Utility() | MediaGone():
                return message
        return None

    def _is_welcome(self, identity: bytes, frontend: FrontendConnection | None, epoch: int) -> bool:
        """Whether a message has this core's epoch and its frontend was welcomed; refuses the frontend otherwise."""
        if epoch != self.epoch:
            self._refuse(identity, "stale epoch: the engine has been started anew since; say Hello")
        elif frontend is None or not frontend.welcomed:
            self._refuse(identity, "unknown connection: say Hello first")
        else:
            return True
        return False

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            ours = f"the engine speaks protocol {PROTOCOL_VERSION}, this frontend {hello.protocol}"
            self._refuse(identity, f"{ours}: they need the same version")
        elif identity in self._frontends:
            self._refuse(identity, "Hello was said before on this connection")
        elif len(self._frontends) >= MAX_FRONTENDS:
            self._refuse(identity, f"the engine has {MAX_FRONTENDS} frontends, the most it takes")
        else:
            frontend = self._frontends[identity] = FrontendConnection(identity, self._clock.now, self._waiting)
            if self._welcome is not None:
                self._greet(frontend)

    def _greet(self, frontend: FrontendConnection) -> None:
        assert self._welcome is not None
        frontend.welcomed = True
        log.info("frontend %s is here", name_of(frontend.identity))
        self.send(frontend.identity, self._welcome)

    def _send_file(self, frontend: FrontendConnection, name: str) -> None:
        """Send each file once per connection: a tokenizer may have 20 MB, and high-water marks count messages."""
        assert self._welcome is not None
        info = next((file for file in self._welcome.files if file.name == name), None)
        if info is None:
            self._refuse(frontend.identity, "there is no such file")
        elif name in frontend.files:
            self._refuse(frontend.identity, "this file was sent before on this connection")
        else:
            frontend.files.add(name)
            self._receive_bytes -= info.size
            self.send(frontend.identity, File(self.epoch, name, info.digest, self._files[name]))

    def _reject(self, identity: bytes, payload: bytes, error: Exception) -> None:
        """Handle an undecodable message: a known frontend's AddRequest fails alone; otherwise the peer is refused."""
        request_id = identify_request(payload, self.epoch)
        if identity in self._frontends and request_id is not None:
            text = str(error)[:500] if isinstance(error, msgspec.ValidationError) else "malformed request"
            self.send(identity, RequestError(self.epoch, request_id, "invalid", text))
        else:
            self._refuse(identity, "malformed message")

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Tell a peer that it is refused; if it was a frontend, drop it."""
        self._refusals.warning("frontend %s is refused: %s", name_of(identity), reason)
        self._forget(identity)
        self._transmit(identity, self._encoder.encode(Refused(self.epoch, reason)))

    # ------------------------------------------------------------------------------------------------- sending
    def send(self, identity: bytes, message: CoreMessage) -> bool:
        """Send, or put into the frontend's outbox while it is slow. False if there is no such frontend (any more).

        Sets the `seq` of StepOutputs in the message itself. Never waits.
        """
        frontend = self._frontends.get(identity)
        if frontend is None:
            return False
        if not frontend.outbox:
            if isinstance(message, StepOutputs):
                msgspec.structs.force_setattr(message, "seq", frontend.next_seq)  # known only now
            outcome = self._transmit(identity, self._encoder.encode(message))
            if outcome == _SENT:
                frontend.next_seq += isinstance(message, StepOutputs)
                return True
            if outcome == _GONE:
                self._forget(identity)
                return False
        frontend.outbox.append(message, self._encoder)
        self._slow[identity] = frontend
        if frontend.outbox.num_bytes > self._outbox_bytes:
            self._refuse(identity, "this frontend reads too slowly: its outputs exceed the engine's bound")
        elif self._waiting.num_bytes > _FULL_OUTBOXES * self._outbox_bytes:
            most = max(self._slow.values(), key=lambda slow: slow.outbox.num_bytes)
            self._refuse(most.identity, "several frontends read too slowly, and this one has the most waiting")
        return identity in self._frontends

    def broadcast(self, message: CoreMessage) -> None:
        """Send a Heartbeat or ShuttingDown to every connection, also to those that still wait for their Welcome.

        Slow frontends miss it. It detects frontends that are gone, so it must be called at least every 0.5 s.
        """
        encoded = self._encoder.encode(message)
        for identity in list(self._frontends):
            if identity not in self._slow and self._transmit(identity, encoded) == _GONE:
                self._forget(identity)

    def flush(self) -> None:
        """Send messages that wait in outboxes, as far as there is room, and refuse frontends that have fallen silent."""
        self._clock.tick()
        for frontend in list(self._slow.values()):
            self._flush_one(frontend)
        if self._clock.now >= self._next_timeout_check:
            self._next_timeout_check = self._clock.now + min(1.0, self._frontend_timeout_s / 4)
            for frontend in list(self._frontends.values()):
                if self._clock.now - frontend.heard_at > self._frontend_timeout_s:
                    self._refuse(frontend.identity, f"this frontend was silent for {self._frontend_timeout_s:.3g} s")

    def _flush_one(self, frontend: FrontendConnection) -> None:
        while frontend.outbox:
            # Sending the identity first tells whether there is room, so that a merged batch is encoded only once.
            outcome = self._open(frontend.identity)
            if outcome == _FULL:
                return
            if outcome == _GONE:
                self._forget(frontend.identity)
                return
            entry = frontend.outbox.first()
            if isinstance(entry, PendingOutputs):
                entry = self._encoder.encode(entry.message(frontend.next_seq))
                frontend.next_seq += 1
            self._router.send(entry, zmq.NOBLOCK)
            frontend.outbox.pop()
        del self._slow[frontend.identity]

    def _transmit(self, identity: bytes, encoded: bytes) -> int:
        outcome = self._open(identity)
        if outcome == _SENT:
            self._router.send(encoded, zmq.NOBLOCK)  # cannot fail: _open has reserved the room
        return outcome

    def _open(self, identity: bytes) -> int:
        """Begin a message to this peer by sending its identity: _SENT (the payload must follow), _FULL or _GONE."""
        try:
            self._router.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return _FULL
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return _GONE
            raise
        return _SENT

    # ------------------------------------------------------------------------------------------------- the lost
    def lost(self) -> list[bytes]:
        """Frontends lost since the last call, for the caller to abort their requests. They send and get nothing more."""
        lost, self._lost = self._lost, []
        return lost

    def _forget(self, identity: bytes) -> None:
        frontend = self._frontends.pop(identity, None)
        if self._slow.pop(identity, None) is not None and frontend is not None:
            frontend.outbox.clear()
        if frontend is not None and frontend.welcomed:
            self._lost.append(identity)

    def check(self) -> None:
        """Assert the invariants between calls."""
        for identity, frontend in self._frontends.items():
            frontend.outbox.check()
            assert bool(frontend.outbox) == (identity in self._slow)
            assert frontend.outbox.num_bytes <= self._outbox_bytes
        assert self._slow.keys() <= self._frontends.keys()
        assert sum(f.outbox.num_bytes for f in self._slow.values()) == self._waiting.num_bytes
        assert self._waiting.num_bytes <= _FULL_OUTBOXES * self._outbox_bytes

    def close(self, linger_s: float = 0.5) -> None:
        """Close after at most linger_s for messages already sent; remove the socket file. May be called again."""
        if self._socket_path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._socket_path)  # while we still listen: later it might be a successor's
            self._socket_path = None
        if self._authenticator is not None:
            self._authenticator.close()
        self._router.close(linger=round(linger_s * 1000))
        self._context.term()
        if self._directory is not None:
            paths.remove_private_directory(self._directory)
            self._directory = None
