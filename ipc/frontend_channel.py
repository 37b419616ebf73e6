"""CoreChannel: a frontend's end of its link to the core, on asyncio (plain or uvloop). It survives the core.

Each connection is a new DEALER with a new identity, which says Hello, gets its Welcome and the files it does not hold, and is
then served until it is lost: the core's end is gone (socket monitor), or silent, or it refuses us, or it shuts down, or a message
is missing. A lost connection is closed with nothing lingering, so that nothing meant for one core reaches its successor; then
it is tried again until there is a core. The user hears of messages, loss and return by callbacks, in the event loop's thread.
"""

import asyncio
import hashlib
import random
import secrets
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from quire.ipc.core_endpoint import DECODE_ERRORS, IDENTITY_BYTES
from quire.ipc.curve import FrontendKeys
from quire.ipc.messages import (
    MAX_CORE_MESSAGE,
    MAX_FRONTEND_MESSAGE,
    PROTOCOL_VERSION,
    CoreMessage,
    File,
    FrontendMessage,
    GetFile,
    Hello,
    Ping,
    Refused,
    ShuttingDown,
    StepOutputs,
    Welcome,
)

PING_INTERVAL_S = 2.0
SILENCE_S = 5.0  # without a message from the core, which beats every 0.5 s
_TICK_S = 0.25
_SEND_HWM = 8192
_RECEIVE_HWM = 256
_MAX_BACKOFF_S = 1.0
_BATCH = 64  # messages dispatched before the event loop gets its turn

_CLOSED = "closed"
_MONITORED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ChannelDown(ConnectionError):
    """There is no connection to a core now."""


class ChannelBusy(Exception):
    """The core does not take messages as fast as they come: try later."""


class CoreChannel:
    """A lasting link to the core at one address. All methods in the event loop's thread.

    welcome: of the present or last connection, None before the first. files: what it listed, by name.
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
        self.address = address
        self.welcome: Welcome | None = None
        self.files: dict[str, bytes] = {}
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._keys = keys
        self._silence_s = silence_s
        self._context = zmq.Context()
        self._files_by_digest: dict[str, bytes] = {}
        self._connection: _Connection | None = None  # set while connected
        self._reason = "not connected yet"
        self._refused = False  # the last attempt was answered, with a refusal
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
    ) -> "CoreChannel":
        """Connect, and stay connected until `close`. Returns once welcomed, with all files there and on_connected called.

        on_message gets StepOutputs, RequestError, PromptLogprobs and Beat of the present epoch. on_lost gets a reason, once per
        loss; every request sent before is then void. Raises ChannelDown after timeout_s without a core (None: waits for ever), or
        as soon as one refuses us.
        """
        channel = cls(address, on_message, on_lost, on_connected, keys, silence_s)
        channel._task = asyncio.get_running_loop().create_task(channel._run(), name="core-channel")
        try:
            async with asyncio.timeout(timeout_s):
                while channel._connection is None:
                    await channel._changed.wait()
                    channel._changed.clear()
                    if channel._task.done() or channel._refused:
                        raise ChannelDown(f"no connection to the core at {address}: {channel._reason}")
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise ChannelDown(f"no core at {address} for {timeout_s} s: {channel._reason}") from None
            raise
        return channel
