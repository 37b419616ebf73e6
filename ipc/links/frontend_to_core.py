"""FrontendToCore: a frontend's end of its link to the core, on asyncio (plain or uvloop). It survives the core.

Each connection is a new DEALER with a new identity. It sends Hello, gets its Welcome and the files that it lacks, and is then
served until it is lost: the core's end is gone (socket monitor), or silent, or refuses us, or shuts down, or a message is
missing. A lost connection is closed without lingering, so that no message for one core reaches its successor. Then the link
reconnects until there is a core. Messages, loss and return are reported by callbacks, in the event loop's thread.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from quire.ipc.links import paths
from quire.ipc.links.curve import FrontendKeys
from quire.ipc.links.dealer import new_dealer
from quire.ipc.links.outgoing import Outgoing
from quire.ipc.links.sockets import readable
from quire.ipc.messages.frontend import (
    MAX_FRONTEND_MESSAGE,
    PROTOCOL_VERSION,
    AdaptersChanged,
    CoreMessage,
    File,
    FrontendMessage,
    GetFile,
    Heartbeat,
    Hello,
    Ping,
    Pooled,
    PromptLogprobs,
    Refused,
    RequestError,
    ShuttingDown,
    StepOutputs,
    UtilityResult,
    Welcome,
)
from quire.ipc.messages.media import MediaData, MediaWanted
from quire.ipc.messages.message import DECODE_ERRORS, MAX_CORE_MESSAGE

PING_INTERVAL_S = 2.0
SILENCE_S = 5.0  # without a message from the core, which sends a heartbeat every 0.5 s
SHUTTING_DOWN = "the engine is shutting down"  # the reason when the core was told to stop
_TICK_S = 0.25
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_BATCH = 64  # messages dispatched before the event loop gets its turn
_MISMATCH = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_PASSED_ON = MediaWanted | PromptLogprobs | Pooled | Heartbeat | AdaptersChanged | UtilityResult
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _MISMATCH


class LinkDown(ConnectionError):
    """There is no connection to a core at present."""


class LinkBusy(Exception):
    """The core does not take messages as fast as they come: try later."""


class FrontendToCore:
    """A lasting link to the core at one address. All methods must be called in the event loop's thread.

    welcome: of the present or last connection, None before the first. files: the files it listed, by name.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[CoreMessage], None],
        on_lost: Callable[[str], None] | None = None,
        on_connected: Callable[[Welcome], None] | None = None,
        keys: FrontendKeys | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Use `connect`, which also waits for the first connection."""
        paths.check_address(address)
        self.address = address
        self.welcome: Welcome | None = None
        self.files: dict[str, bytes] = {}
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._keys = keys
        self._silence_s = silence_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._context = zmq.Context()
        self._files_by_digest: dict[str, bytes] = {}
        self._connection: _Connection | None = None  # set while connected
        self._reason = "not connected yet"
        self.refusal: str | None = None  # the answer to the last attempt, if it was refused
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        on_message: Callable[[CoreMessage], None],
        on_lost: Callable[[str], None] | None = None,
        on_connected: Callable[[Welcome], None] | None = None,
        keys: FrontendKeys | None = None,
        timeout_s: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> "FrontendToCore":
        """Connect, and stay connected until `close`. Returns once welcomed, with all files received and on_connected called.

        on_message gets messages of the present epoch. on_lost gets a reason, once per loss; all requests have then failed.
        Raises LinkDown after timeout_s without a core (None: never), or when one refuses us; ValueError for a bad address.
        """
        link = cls(address, on_message, on_lost, on_connected, keys, silence_s)
        link._task = asyncio.get_running_loop().create_task(link._run(), name="core-link")
        link._task.add_done_callback(lambda _: link._changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while link._connection is None:
                    await link._changed.wait()
                    link._changed.clear()
                    if link._task.done():
                        link._task.result()
                    if link.refusal:
                        raise LinkDown(f"no connection to the engine at {address}: {link.refusal}")
        except BaseException as error:
            reason = link._reason
            await link.close()
            if isinstance(error, TimeoutError):
                raise LinkDown(f"no engine at {address} for {timeout_s:g} s: {reason}") from None
            raise
        return link

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def epoch(self) -> int:
        """The connected core's epoch, for messages to it; 0 without a connection."""
        return self._connection.epoch if self._connection is not None else 0

    def send(self, message: FrontendMessage) -> None:
        """Queue a message for the core; never waits.

        Raises LinkDown without a connection, LinkBusy if thousands of messages are queued already, ValueError for a
        message larger than the core's limit.
        """
        if self._connection is None:
            raise LinkDown(self._reason)
        encoded = self._encoder.encode(message)
        if len(encoded) > MAX_FRONTEND_MESSAGE:
            raise ValueError(f"a message of {len(encoded)} bytes is longer than the {MAX_FRONTEND_MESSAGE} the engine takes")
        if not self._connection.outgoing.send(encoded):
            if self._connection is None or self._connection.is_going():
                raise LinkDown("the engine has gone")
            raise LinkBusy("the engine does not keep up with this frontend's messages")

    def send_media(self, message: MediaData, tensors: Sequence[bytes | memoryview]) -> None:
        """Queue the tensors of an item, each of at most MAX_TENSOR_BYTES, after what was sent before; raises as `send` does."""
        if self._connection is None:
            raise LinkDown(self._reason)
        if not self._connection.outgoing.send_frames([self._encoder.encode(message), *tensors]):
            raise LinkBusy("the engine does not keep up with this frontend's messages")

    def hold(self) -> None:
        """Hold messages until the end of the event loop's next turn, then send them together, as many as a message may hold.

        The core receives them in one turn, so that its next step can start all of them.
        """
        if self._connection is not None:
            self._connection.outgoing.hold()

    def watch(self, seconds: float) -> None:
        """Poll for outputs or a refusal in every turn of the event loop until one comes, for at most `seconds`.

        The loop keeps a CPU core busy meanwhile; waking it from sleep would take some 0.2 ms.
        """
        if (
            self._connection is not None and not self._connection.outgoing.is_holding
        ):  # if it holds, the request has not left yet
            self._connection.watch(seconds)

    async def close(self) -> None:
        """End the connection without on_lost; the core aborts running requests. May be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._connection, self._reason = None, "the link is closed"
        self._context.term()

    async def _run(self) -> None:
        """Connect, wait for the connection's end, back off; forever."""
        loop = asyncio.get_running_loop()
        backoff_s = _MIN_BACKOFF_S
        while True:
            started = loop.time()
            try:
                connection = _Connection(self)
            except zmq.ZMQError as error:
                if self.welcome is None:  # the address cannot be used
                    raise ValueError(f"no connection can be made to {self.address}: {error.strerror}") from error
                self._reason = f"no connection can be made: {error}"  # no descriptors are left, for now
            else:
                try:
                    await connection.ended
                finally:  # also when asyncio.run's end cancels it, maybe before tasks that still abort their requests
                    connection.close()
                    self._connection = None
            backoff_s = _MIN_BACKOFF_S if loop.time() - started > 1.0 else min(2 * backoff_s, _MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    def _up(self, connection: "_Connection", welcome: Welcome, files: dict[str, bytes]) -> None:
        self.welcome, self.files, self._connection = welcome, files, connection
        self._changed.set()
        if self._on_connected is not None:
            self._on_connected(welcome)

    def _down(self, reason: str, refused: bool) -> None:
        was_up, self._connection = self._connection is not None, None
        self._reason, self.refusal = reason, reason if refused and not was_up else None
        self._changed.set()
        if was_up and self._on_lost is not None:
            self._on_lost(reason)


class _Connection:
    """One DEALER's life: hello, fetching files, serving, ended. Everything happens in callbacks of the event loop."""

    def __init__(self, link: FrontendToCore) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.epoch = 0  # 0 until welcomed
        self._serving = False
        self._welcome: Welcome | None = None
        self._missing: dict[str, str] = {}  # name -> digest of files that were requested
        self._next_seq = 0
        self._silent_ticks = 0
        self._is_watching = False
        self._watch_until = 0.0
        self._next_ping = self._loop.time() + PING_INTERVAL_S
        self._encoder, self._decoder = link._encoder, link._decoder

        self._socket = new_dealer(link._context, link.address, link._keys, MAX_CORE_MESSAGE)
        self.outgoing = Outgoing(self._socket, self._on_readable, self._on_stuck)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self._monitor.fileno(), self._on_monitor)
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        try:
            self._socket.connect(link.address)
        except zmq.ZMQError:
            self.close()
            raise
        self.outgoing.send(self._encoder.encode(Hello(PROTOCOL_VERSION)))
        self._on_monitor()

    def watch(self, seconds: float) -> None:
        self._watch_until = self._loop.time() + seconds
        if not self._is_watching:
            self._is_watching = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._socket.closed or self._loop.time() >= self._watch_until:
            self._is_watching = False
            return
        self._loop.call_soon(self._look)
        if readable(self._socket):
            self._on_readable()

    def _on_stuck(self, reason: str) -> None:
        self._on_monitor()  # it may know the reason
        self.end(reason)

    def is_going(self) -> bool:
        """Whether the monitor has an end of the connection to report that the event loop has not handled yet."""
        if readable(self._monitor):
            self._loop.call_soon(self._on_monitor)  # we may have consumed the descriptor's edge
            return True
        return False

    def end(self, reason: str, refused: bool = False) -> None:
        """Close at once and report the reason; nothing is dispatched after this."""
        if not self.ended.done():
            self.close()
            self.ended.set_result(reason)
            self._link._down(reason, refused)

    def close(self) -> None:
        if self._socket.closed:
            return
        self._ticker.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    # ------------------------------------------------------------------------------------------------- events
    def _on_readable(self) -> None:
        for _ in range(_BATCH):
            if self._socket.closed or not readable(self._socket):
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._dispatch(frames)
            except BaseException:  # raised by a callback: re-raised, but it must not stop later messages
                self._loop.call_soon(self._on_readable)
                raise
        self._loop.call_soon(self._on_readable)

    def _on_monitor(self) -> None:
        while not self._socket.closed and readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.end("the engine does not admit this frontend's key", refused=True)
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self.end("the handshake failed: one side uses keys that the other does not expect")
            else:
                # The core's last messages (a refusal, tokens) have arrived before this event.
                while not self._socket.closed and readable(self._socket):
                    self._on_readable()
                self.end("the engine has gone" if self._welcome is not None else "none listens at this address")

    def _tick(self) -> None:
        # Silence is counted in ticks: time in which this process itself stood still does not count.
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        self._silent_ticks += 1
        if self._silent_ticks * _TICK_S > self._link._silence_s:
            self.end(f"the engine has been silent for {self._link._silence_s:.3g} s")
        elif self._loop.time() >= self._next_ping:
            self._next_ping = self._loop.time() + PING_INTERVAL_S
            self.outgoing.send(self._encoder.encode(Ping(self.epoch)))

    # ------------------------------------------------------------------------------------------------- messages
    def _dispatch(self, frames: list[bytes]) -> None:
        self._silent_ticks = 0
        try:
            message = self._decoder.decode(b"".join(frames))
        except DECODE_ERRORS:
            return self.end("the engine sent a malformed message")
        match message:
            case StepOutputs() if self._serving and message.epoch == self.epoch:
                if message.seq != self._next_seq:
                    return self.end(f"outputs were lost: expected number {self._next_seq}, got {message.seq}")
                self._next_seq += 1
                self._watch_until = 0.0
                self._link._on_message(message)
            case Welcome() if self._welcome is None:
                self._welcomed(message)
            case Refused():
                self.end(f"refused by the engine: {message.reason}", refused=True)
            case ShuttingDown() if message.epoch == self.epoch or not self._serving:
                self.end(SHUTTING_DOWN)
            case File() if message.epoch == self.epoch and not self._serving:
                self._received(message)
            case RequestError() if self._serving and message.epoch == self.epoch:
                self._watch_until = 0.0
                self._link._on_message(message)
            case _ if self._serving and message.epoch == self.epoch and isinstance(message, _PASSED_ON):
                self._link._on_message(message)

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            return self.end(f"the engine speaks protocol {welcome.protocol}, not {PROTOCOL_VERSION}", refused=True)
        self._welcome, self.epoch = welcome, welcome.epoch
        held = self._link._files_by_digest
        self._missing = {file.name: file.digest for file in welcome.files if file.digest not in held}
        for name in self._missing:
            self.outgoing.send(self._encoder.encode(GetFile(self.epoch, name)))
        self._serve_if_complete()

    def _received(self, file: File) -> None:
        if self._missing.get(file.name) != hashlib.sha256(file.data).hexdigest():
            return self.end(f"the engine sent a file {file.name!r} that is not the one it announced")
        self._link._files_by_digest[self._missing.pop(file.name)] = file.data
        self._serve_if_complete()

    def _serve_if_complete(self) -> None:
        if self._missing or self._welcome is None:
            return
        held = self._link._files_by_digest
        files = {file.name: held[file.digest] for file in self._welcome.files}
        self._link._files_by_digest = {file.digest: held[file.digest] for file in self._welcome.files}
        self._serving = True
        self._link._up(self, self._welcome, files)
