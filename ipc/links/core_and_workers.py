"""The control link between core and workers: start-up, failures and large results. Data of every step goes through the rings.

CoreToWorkers is the core's end, a ROUTER on a private ipc address, driven by the core's loop. WorkerToCore is a worker's end, a
DEALER with an identity that names its rank and its generation of workers: messages of earlier generations are dropped.
"""

import errno
import struct
import threading

import msgspec
import zmq

from quire.ipc.links import paths
from quire.ipc.links.sockets import readable
from quire.ipc.messages.message import DECODE_ERRORS, MAX_CORE_MESSAGE
from quire.ipc.messages.workers import WorkerCommand, WorkerFailed, WorkerMessage

_HWM = 1024
_IDENTITY = struct.Struct("<4sqi")  # "rank", generation, rank: the first byte is not zero, which libzmq reserves
_TAG = b"rank"


class CoreToWorkers:
    """The core's end; one thread. `generation` is the present one of workers: set it before starting a new one."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerMessage)
        self._directory = paths.private_directory()
        self.address = f"ipc://{self._directory}/workers"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.SNDHWM, _HWM)
        self._router.set(zmq.RCVHWM, _HWM)
        self._router.set(zmq.MAXMSGSIZE, MAX_CORE_MESSAGE)
        self._router.bind(self.address)

    def sockets(self) -> list[zmq.Socket]:
        """For a zmq.Poller, with POLLIN."""
        return [self._router]

    def receive(self, limit: int = 64) -> list[tuple[int, WorkerMessage]]:
        """Messages of this generation that have arrived, as (rank, message); a WorkerFailed for one that cannot be decoded."""
        messages: list[tuple[int, WorkerMessage]] = []
        for _ in range(limit):
            if not readable(self._router):
                break
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            rank = self._rank(identity)
            if rank is not None:
                messages.append((rank, self._decode(rank, b"".join(frames))))
        return messages

    def _rank(self, identity: bytes) -> int | None:
        if len(identity) != _IDENTITY.size:
            return None
        tag, generation, rank = _IDENTITY.unpack(identity)
        return rank if tag == _TAG and generation == self.generation else None

    def _decode(self, rank: int, encoded: bytes) -> WorkerMessage:
        try:
            message = self._decoder.decode(encoded)
        except DECODE_ERRORS as error:
            return WorkerFailed(rank, f"worker {rank} sent a message that cannot be read: {str(error)[:500]}")
        if message.rank != rank:
            return WorkerFailed(rank, f"worker {rank} sent a message in the name of worker {message.rank}")
        return message

    def send(self, rank: int, command: WorkerCommand) -> bool:
        """Send to a worker of this generation that has sent something; False if it is gone (see its pidfd) or does not read."""
        try:
            self._router.send_multipart(
                [_IDENTITY.pack(_TAG, self.generation, rank), self._encoder.encode(command)], zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Close and remove the socket's folder. May be called again."""
        self._router.close(linger=0)
        self._context.term()
        paths.remove_private_directory(self._directory)


class WorkerToCore:
    """A worker's end. Blocking calls with time-outs. Any thread may send; one thread at a time may do anything else, and none
    receives while several threads send."""

    def __init__(self, address: str, rank: int, generation: int) -> None:
        """Connect; the core's end is bound before the worker starts."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerCommand)
        self._sending = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, _IDENTITY.pack(_TAG, generation, rank))
        self._socket.set(zmq.SNDHWM, _HWM)
        self._socket.set(zmq.RCVHWM, _HWM)
        self._socket.set(zmq.MAXMSGSIZE, MAX_CORE_MESSAGE)
        self._socket.connect(address)

    def send(self, message: WorkerMessage, timeout_s: float = 10.0) -> None:
        """Send. Raises TimeoutError if the core does not take it."""
        with self._sending:
            if not self._socket.poll(round(timeout_s * 1000), zmq.POLLOUT):
                raise TimeoutError(f"the core has not taken a message for {timeout_s:.3g} s")
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> WorkerCommand | None:
        """The next command, or None after timeout_s. Raises ValueError for a message that cannot be read."""
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        try:
            return self._decoder.decode(b"".join(self._socket.recv_multipart()))
        except DECODE_ERRORS as error:
            raise ValueError(f"the core sent a command that cannot be read: {error}") from None

    def close(self, linger_s: float = 1.0) -> None:
        """Close; the last message (a WorkerFailed) has linger_s to leave. May be called again."""
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()
