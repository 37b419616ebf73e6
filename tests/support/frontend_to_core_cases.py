"""Shared by tests of FrontendToCore: a listener, cores that answer or act as the test says, and ways to lose a connection."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
from ipc_cores import LoopingCore

from quire.ipc.links.frontend_to_core import FrontendToCore
from quire.ipc.messages.frontend import (
    AddRequest,
    CoreMessage,
    Finished,
    FrontendMessage,
    Generate,
    Heartbeat,
    StepOutputs,
    TokenInputs,
    Welcome,
)
from quire.ipc.sampling import SamplingParams


class Listener:
    """What a link's callbacks have heard, and waiting for more of it."""

    def __init__(self) -> None:
        self.messages: list[CoreMessage] = []
        self.log: list[str | int] = []  # epochs of connections, reasons of losses
        self.changed = asyncio.Event()

    def options(self) -> dict[str, Callable]:
        return {"on_message": self.on_message, "on_lost": self.on_lost, "on_connected": self.on_connected}

    def on_message(self, message: CoreMessage) -> None:
        if not isinstance(message, Heartbeat):
            self.messages.append(message)
        self.changed.set()

    def on_lost(self, reason: str) -> None:
        self.log.append(reason)
        self.changed.set()

    def on_connected(self, welcome: Welcome) -> None:
        self.log.append(welcome.epoch)
        self.changed.set()

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    def tokens(self) -> list[int]:
        return [t for m in self.messages for t in np.frombuffer(m.tokens, np.int32).tolist()]


def outputs(epoch: int, key: int, *tokens: int, finished: bool = False) -> StepOutputs:
    keys, data = np.full(len(tokens), key, np.int64).tobytes(), np.asarray(tokens, np.int32).tobytes()
    return StepOutputs(epoch, 0, keys, data, [Finished(key, "stop")] if finished else [])


def echo(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
    """One token for each request: its id."""
    if isinstance(message, AddRequest):
        core.link.send(identity, outputs(core.epoch, message.id << 8, message.id, finished=True))


def add(link: FrontendToCore, request_id: int) -> AddRequest:
    return AddRequest(link.epoch, request_id, TokenInputs(b"\1\0\0\0"), Generate(SamplingParams()))


class ScriptedCore:
    """A link turned by the test inside its own event loop, step by step."""

    def __init__(self, address: str | None = None, epoch: int = 1, **options) -> None:
        self.core = LoopingCore(address, epoch, **options)

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it has not happened in time"
            self.core.turn(1)
            await asyncio.sleep(0)


def loses(run, provoke: Callable[[ScriptedCore, FrontendToCore], None], reason: str, **options) -> None:
    """A connection on which something happens is lost for the reason given, and made anew."""

    async def main() -> None:
        scripted, heard = ScriptedCore(epoch=9), Listener()
        connecting = asyncio.create_task(FrontendToCore.connect(scripted.core.link.address, **heard.options(), **options))
        await scripted.until(connecting.done)
        link = connecting.result()
        first = scripted.core.link.frontends
        provoke(scripted, link)
        await heard.until(lambda: len(heard.log) >= 2) if not scripted.core.heartbeats else await scripted.until(
            lambda: len(heard.log) >= 2
        )
        assert reason in heard.log[1]
        scripted.core.heartbeats = True
        await scripted.until(lambda: link.connected)
        await scripted.until(lambda: len(scripted.core.link.frontends) == 1)
        assert heard.log[2:] == [9] and scripted.core.link.frontends != first  # a new identity
        await link.close()
        scripted.core.link.close(linger_s=0)

    run(main())
