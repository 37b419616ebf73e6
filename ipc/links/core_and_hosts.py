"""The link between a core and the agents of other hosts: tcp with CURVE keys on both sides, whatever the addresses are.

CoreToHost is the core's end, a DEALER for each host and generation of workers: it connects, and its monitor reports its loss.
HostToCore is an agent's end, a ROUTER that admits only the keys on its list. Neither end blocks: the loops of their processes
drive them (enginecore/hosts/).
"""

import errno
import secrets
from contextlib import suppress

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from quire.ipc.links import paths
from quire.ipc.links.curve import ZAP_DOMAIN, Authenticator, CoreKeys, KeyPair
from quire.ipc.links.sockets import readable
from quire.ipc.messages.hosts import MAX_FROM_HOST, MAX_TO_HOST, HostCommand, HostMessage
from quire.ipc.messages.message import DECODE_ERRORS, IDENTITY_BYTES

_HWM = 1024
_RETRY_MS = 200  # between attempts to connect
_NOT_ADMITTED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _NOT_ADMITTED | _NO_HANDSHAKE


class HostUnreadable(Exception):
    """A host sent bytes that are no message of Quire's."""


class HostLost(Exception):
    """The connection cannot be made, or is gone; the text says what happened, without the host's name."""


class NotThisHost(HostLost):
    """The listener seems not to be the host with this key. A proxy looks the same while the host behind it is away."""


def check_host_address(address: str, *, listens: bool = False) -> None:
    """Raises ValueError if it is no tcp address; only a listener may leave the choice of a port open."""
    host = paths.check_address(address)
    if host is None:
        raise ValueError(f"{address}: hosts are reached by tcp://host:port")
    if not listens and (address.endswith((":*", ":0")) or host in ("*", "0.0.0.0", "[::]")):
        raise ValueError(f"{address}: that is where a host may listen, not an address of one")


class CoreToHost:
    """The core's end; one thread. Its sockets can be polled before `connect`, which may come much later."""

    def __init__(self, context: zmq.Context, keys: KeyPair) -> None:
        self._keys = keys
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HostMessage)
        self._is_up = False
        self._socket = context.socket(zmq.DEALER)
        # Identities that begin with a zero byte are reserved by libzmq.
        self._socket.set(zmq.ROUTING_ID, bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(IDENTITY_BYTES - 1))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, _RETRY_MS)
        self._socket.set(zmq.HANDSHAKE_IVL, 0)  # no limit: the caller decides how long it may take
        self._socket.set(zmq.SNDHWM, _HWM)
        self._socket.set(zmq.RCVHWM, _HWM)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FROM_HOST)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)

    def connect(self, address: str, public_key: bytes) -> None:
        """Raises zmq.ZMQError for an address that no socket can use."""
        self._socket.set(zmq.IPV6, int("[" in address))
        self._socket.set(zmq.CURVE_SERVERKEY, public_key)
        self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        self._socket.connect(address)

    def sockets(self) -> list[zmq.Socket]:
        """For a zmq.Poller, with POLLIN."""
        return [self._socket, self._monitor]

    def encode(self, command: HostCommand) -> bytes:
        return self._encoder.encode(command)

    def send(self, encoded: bytes) -> bool:
        """Queue a message of `encode`; False if the queue is full because the host does not read."""
        try:
            self._socket.send(encoded, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, limit: int = 64) -> list[HostMessage]:
        """Messages that have arrived. Raises HostUnreadable."""
        messages: list[HostMessage] = []
        while len(messages) < limit and readable(self._socket):
            try:
                messages.append(self._decoder.decode(b"".join(self._socket.recv_multipart(zmq.NOBLOCK))))
            except DECODE_ERRORS as error:
                raise HostUnreadable(str(error)[:500]) from None
        return messages

    def check(self) -> None:
        """Raises HostLost if we are not admitted, if the listener is not the host with this key, or if a connection was lost.

        Call it after `receive`: the host's last messages arrive before the event of its end.
        """
        while readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event == _NOT_ADMITTED:
                raise HostLost(f"it does not admit this engine's key, {self._keys.public.decode()}")
            elif event & _NO_HANDSHAKE or not self._is_up:
                raise NotThisHost("its key is not the one that is expected, or what listens there is no `quire host`")
            else:
                raise HostLost("its agent, or the connection to it, is gone")

    def close(self, linger_s: float = 0.0) -> None:
        """The last message has linger_s to leave. May be called again."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=round(linger_s * 1000))


class HostToCore:
    """An agent's end; one thread."""

    def __init__(self, address: str, keys: CoreKeys) -> None:
        """Bind; sets `address` to the bound address. Raises ValueError or zmq.ZMQError for an address that cannot be used."""
        check_host_address(address, listens=True)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HostCommand)
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, keys.allowed)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.SNDHWM, _HWM)
        self._router.set(zmq.RCVHWM, _HWM)
        self._router.set(zmq.MAXMSGSIZE, MAX_TO_HOST)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.IPV6, int("[" in address))
        self._router.set(zmq.CURVE_SERVER, 1)
        self._router.set(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            self._router.bind(address)
        except (ValueError, zmq.ZMQError):
            self.close()
            raise
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def sockets(self) -> list[zmq.Socket]:
        """For a zmq.Poller, with POLLIN."""
        return [self._router, self._authenticator.socket]

    def receive(self, limit: int = 64) -> list[tuple[bytes, HostCommand | None]]:
        """Commands that have arrived, as (connection, command); None for one that cannot be decoded."""
        self._authenticator.answer()
        commands: list[tuple[bytes, HostCommand | None]] = []
        while len(commands) < limit and readable(self._router):
            connection, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            command = None
            with suppress(*DECODE_ERRORS):
                command = self._decoder.decode(b"".join(frames))
            commands.append((connection, command))
        return commands

    def send(self, connection: bytes, message: HostMessage) -> bool:
        """False if the connection is gone, or its queue is full because its core does not read."""
        try:
            self._router.send_multipart([connection, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """The last message has linger_s to leave. May be called again."""
        self._authenticator.close()
        self._router.close(linger=round(linger_s * 1000))
        self._context.term()
